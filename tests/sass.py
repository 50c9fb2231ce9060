"""Finds the loops of a kernel in its SASS, and counts their loads from and stores to the stack (spills)."""

from __future__ import annotations

import re
from dataclasses import dataclass

_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/ +([^;]*);")
_JUMP = re.compile(r"BRA.* (0x[0-9a-f]+)")
_LAST = re.compile(r"BRA 0x|BRX|EXIT|RET|JMP")


@dataclass(frozen=True)
class StackTraffic:
    """Stack accesses in the hot loops: the innermost loops, and the innermost ones with asynchronous products (GMMA),
    which may contain a small loop that waits for a barrier."""

    stores: int
    loads: int  # also of values stored outside the loop; cheap while they are in L1


def stack_traffic(sass: str) -> StackTraffic:
    """The stack accesses in the hot loops of a disassembled kernel."""
    if "STL" not in sass and "LDL" not in sass:
        return StackTraffic(0, 0)
    blocks, after = _flow([(int(found[1], 16), found[2]) for found in _INSTRUCTION.finditer(sass)])
    loops = _loops(after)
    multiplying = [loop for loop in loops if any("GMMA" in text for block in loop for text in blocks[block])]
    counted = set[int]().union(*_innermost(loops), *_innermost(multiplying))
    texts = [text for block in counted for text in blocks[block]]
    return StackTraffic(sum("STL" in text for text in texts), sum("LDL" in text for text in texts))


def _flow(code: list[tuple[int, str]]) -> tuple[list[list[str]], list[list[int]]]:
    """(basic blocks as lists of instructions, successors of each block) of code given as (address, instruction)."""
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
    """The natural loops of a control-flow graph, as sets of blocks.

    A loop has a jump back to a block that dominates the jump. Other jumps back are no loops: the code that waits for a
    barrier is placed out of line and jumps back to where it came from.
    """
    before: list[list[int]] = [[] for _ in after]
    for block, ways in enumerate(after):
        for way in ways:
            before[way].append(block)
    reached: set[int] = set()
    entries = []
    for block in range(len(after)):  # the first block, and targets of jump tables
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
    """The blocks reachable from `starts`, these included, on paths that avoid the block `without`."""
    found: set[int] = set()
    waiting = [start for start in starts if start != without]
    while waiting:
        block = waiting.pop()
        if block not in found:
            found.add(block)
            waiting.extend(way for way in ways[block] if way != without)
    return found
