"""Finds values that Triton loses: carried round a loop, and read by the bounds of loops inside it alone.

Triton 3.6 takes such a value for dead, and the first iteration's for all of them (its loop-aware CSE does not look at
the bounds of inner loops). Neither its interpreter nor the emulator of Gluon shows that.
"""

from __future__ import annotations

import re
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

_LOCATION = re.compile(r" loc\((?:[^()]|\([^()]*\))*\)")
_VALUE = re.compile(r"%[\w$.\-]+(?:#\d+)?")
_RESULTS = re.compile(r"((?:%[\w$.\-]+(?::\d+)?(?:, )?)+) = (.*)")
_LOOP = re.compile(r"scf\.for (?:unsigned )?\S+ = (\S+) to (\S+) step (\S+)(?: iter_args\((.*?)\) ->)?")
_PURE = re.compile(r"(arith|math)\.|tt\.(addptr|splat|load|broadcast|expand_dims|bitcast|make_range|reshape|trans)\b")


@dataclass
class _Operation:
    text: str
    parent: _Operation | None
    results: list[str] = field(default_factory=list)
    bounds: Sequence[str] = ()  # of a loop, as the following
    carried: list[str] = field(default_factory=list)
    initial: list[str] = field(default_factory=list)


def lost_values(text: str) -> list[str]:
    """Such values in a module whose functions are inlined, and the loops that carry them."""
    users: dict[str, list[_Operation]] = defaultdict(list)
    open_operations: list[_Operation] = []
    loops: list[_Operation] = []
    for line in text.splitlines():
        line = _LOCATION.sub("", line).strip()
        if line.startswith("}"):
            if not line.endswith("{"):  # not another region of the same operation
                open_operations.pop()
            continue
        named = _RESULTS.match(line)
        operation = _Operation(named[2] if named else line, open_operations[-1] if open_operations else None)
        for result in named[1].split(", ") if named else ():
            name, _, count = result.partition(":")
            operation.results += [f"{name}#{index}" for index in range(int(count))] if count else [name]
        loop = _LOOP.match(operation.text)
        if loop:
            operation.bounds = loop.groups()[:3]
            for pair in loop[4].split(", ") if loop[4] else ():
                operation.carried.append(pair.split(" = ")[0])
                operation.initial.append(pair.split(" = ")[1])
            loops.append(operation)
        for value in {*operation.bounds, *operation.initial} if loop else set(_VALUE.findall(operation.text)):
            users[value].append(operation)
        if line.endswith("{"):
            open_operations.append(operation)
    return [f"{value} of {loop.text}" for loop in loops for value in loop.carried if _only_bounds(value, users)]


def _only_bounds(value: str, users: dict[str, list[_Operation]]) -> bool:
    """Whether a value has an effect through the bounds of loops alone."""
    found, waiting, seen = False, [value], {value}
    while waiting:
        value = waiting.pop()
        for user in users[value]:
            following: list[str] = []
            if user.text.startswith("scf.for"):
                found = found or value in user.bounds
                for carried, initial, result in zip(user.carried, user.initial, user.results):
                    following += [carried, result] * (initial == value)
            elif user.text.startswith("scf.yield") and user.parent is not None:
                if not user.parent.text.startswith(("scf.for", "scf.if")):
                    return False
                for index, yielded in enumerate(_VALUE.findall(user.text)):
                    if yielded == value:
                        following += [x[index] for x in (user.parent.results, user.parent.carried) if x]
            elif _PURE.match(user.text) and "isVolatile = true" not in user.text:
                following = user.results
            else:
                return False
            waiting += [x for x in following if x not in seen]
            seen.update(following)
    return found


def inlined(source: str, arch: int) -> str:
    """A module of Gluon's code generator with its functions inlined."""
    from triton._C.libtriton import ir, passes
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    context = ir.context()
    ir.load_dialects(context)
    make_backend(GPUTarget("cuda", arch, 32)).load_dialects(context)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "source.ttgir")
        path.write_text(source)
        module = ir.parse_mlir_module(str(path), context)
    manager = ir.pass_manager(context)
    passes.gluon.add_inliner(manager)
    manager.run(module, "inlined")
    return str(module)
