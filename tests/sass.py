"""What the machine code of a kernel does in its loops: reads of and writes to the stack, found in its disassembly."""

from __future__ import annotations

import re
from dataclasses import dataclass

_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/ +([^;]*);")
_JUMP = re.compile(r"BRA.* (0x[0-9a-f]+)")
_LAST = re.compile(r"BRA 0x|BRX|EXIT|RET|JMP")


@dataclass(frozen=True)
class StackTraffic:
    """Accesses to the stack inside the loops where they cost: the innermost ones, and the innermost of those that
    issue asynchronous products, in which a small loop that waits for a barrier may lie."""

    stores: int
    loads: int  # also of values that were stored outside: cheap while L1 has them


def stack_traffic(sass: str) -> StackTraffic:
    if "STL" not in sass and "LDL" not in sass:
        return StackTraffic(0, 0)
    blocks, after = _flow([(int(found[1], 16), found[2]) for found in _INSTRUCTION.finditer(sass)])
    loops = _loops(after)
    multiplying = [loop for loop in loops if any("GMMA" in text for block in loop for text in blocks[block])]
    counted = set[int]().union(*_innermost(loops), *_innermost(multiplying))
    texts = [text for block in counted for text in blocks[block]]
    return StackTraffic(sum("STL" in text for text in texts), sum("LDL" in text for text in texts))


def _flow(code: list[tuple[int, str]]) -> tuple[list[list[str]], list[list[int]]]:
    """Basic blocks (their instructions) and where each leads, of code given as addresses and instructions."""
    addresses = {address for address, _ in code}
    targets = [int(jump[1], 16) if (jump := _JUMP.search(text)) else None for _, text in code]
    heads = {target for target in targets if target in addresses}
    blocks: list[list[str]] = []
    ends: list[tuple[int | None, bool]] = []  # by block: where its last instruction jumps to, whether it may go on
    block_of: dict[int, int] = {}
    ended = True
    for (address, text), target in zip(code, targets):
        if ended or address in heads:
            block_of[address] = len(blocks)
            blocks.append([])
            ends.append((None, True))
        blocks[-1].append(text)
        ended = target is not None or _LAST.match(text) is not None
        ends[-1] = (target, _LAST.match(text) is None)
    after = []
    for block, (target, goes_on) in enumerate(ends):
        ways = [block_of[target]] if target in block_of else []
        after.append([*ways, block + 1] if goes_on and block + 1 < len(blocks) else ways)
    return blocks, after


def _loops(after: list[list[int]]) -> list[set[int]]:
    """The blocks of each loop.

    A loop ends in a jump back to a block that every way to the jump leads through. Not every jump back is one: waiting
    for a barrier is compiled out of line, and returns to where it was left.
    """
    before: list[list[int]] = [[] for _ in after]
    for block, ways in enumerate(after):
        for way in ways:
            before[way].append(block)
    reached: set[int] = set()
    entries = []
    for block in range(len(after)):  # beside the first, only where jumps through a table lead
        if block not in reached:
            entries.append(block)
            reached |= _reachable([block], after)
    loops: dict[int, set[int]] = {}  # of all jumps back to a block
    for head in range(len(after)):
        backward = [block for block in before[head] if block >= head]
        if backward:
            around = _reachable(entries, after, without=head)
            for block in backward:
                if block not in around:
                    loops.setdefault(head, {head}).update(_reachable([block], before, without=head))
    return list(loops.values())


def _innermost(loops: list[set[int]]) -> list[set[int]]:
    return [loop for loop in loops if not any(other < loop for other in loops)]


def _reachable(starts: list[int], ways: list[list[int]], without: int = -1) -> set[int]:
    """Where `ways` lead from `starts`, themselves included, never through one block."""
    found: set[int] = set()
    waiting = [start for start in starts if start != without]
    while waiting:
        block = waiting.pop()
        if block not in found:
            found.add(block)
            waiting.extend(way for way in ways[block] if way != without)
    return found
