"""Which cases are profiled, and what becomes a record.

The representative case of an operator is the median by work of the benchmark cases whose forward pass is neither
trivial nor long; where it has no gradients, the median of those that have is profiled too. Work is counted in GB moved
plus TFLOP computed, as the operator's cost declares; from 0.1 to 1.5 a case fills a GPU many times over, and a profiler
can still repeat it some dozen times within seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from operator import attrgetter
from typing import Any

import torch

from flashkernel.core import roofline
from flashkernel.core.device import Device
from flashkernel.core.op import Case, Op
from flashkernel.core.roofline import Ceilings
from flashkernel.lab import bench, builds, selection
from flashkernel.lab.profile_records import ProfileRecord
from flashkernel.lab.profile_session import Outcome
from flashkernel.lab.profile_worker import Target

Pass = tuple[str, str, str]  # operator, backend, "fwd" or "bwd"

KERNEL_BACKENDS = ("cuda", "triton", "hopper")  # those that launch kernels of this project
MIN_WORK, MAX_WORK = 0.1, 1.5  # GB moved plus TFLOP computed


def work(op: Op, case: Case, dtype: torch.dtype) -> float:
    """GB moved plus TFLOP computed by the forward pass, at least; 0 for a case that is timed as a whole step alone."""
    cost = op.cost(case, dtype).get("fwd")
    return 0.0 if cost is None else cost.bytes / 1e9 + cost.flops / 1e12


def preferred_order(amounts: Sequence[float]) -> list[int]:
    """Indices of amounts of work, the most representative first: the median of those from MIN_WORK to MAX_WORK, its
    neighbors, then those out of the range.

    Example:
        >>> preferred_order([0.001, 0.2, 0.4, 1.2, 9.0])
        [2, 1, 3, 4, 0]
    """
    ordered = sorted(range(len(amounts)), key=lambda index: amounts[index])
    fitting = [index for index in ordered if MIN_WORK <= amounts[index] <= MAX_WORK]
    median = (len(fitting) - 1) // 2
    inside = [index for _, index in sorted(enumerate(fitting), key=lambda one: abs(one[0] - median))]

    def distance(index: int) -> float:
        return max(MIN_WORK / max(amounts[index], 1e-12), amounts[index] / MAX_WORK)

    return inside + sorted((index for index in ordered if index not in fitting), key=distance)


def by_preference(op: Op, cases: Sequence[Case], dtype: torch.dtype) -> list[Case]:
    """The cases, the most representative one first."""
    return [cases[index] for index in preferred_order([work(op, case, dtype) for case in cases])]


def select(
    ops: Sequence[Op],
    patterns: Sequence[str] | None,
    implementations: Sequence[str] | None,
    dtypes: Sequence[torch.dtype] | None,
    hardware: Device,
    on_note: Callable[[str], None] = lambda text: None,
) -> Iterator[Target]:
    """Yields what to profile: for each operator and implementation the cases that match, or the representative one.

    Args:
        ops: the operators.
        patterns: globs of benchmark cases; None for the representative case of each implementation.
        implementations: backends, or builds such as "cuda_sm75"; None for all kernel backends of an operator.
        dtypes: None for each case's first one; float16 where the GPU or the build has no bfloat16.
        hardware: the GPU.
        on_note: called with what is left out, and why.
    """
    matching = selection.cases(ops, patterns, lambda op: op.benches)
    for op in ops:
        declared = [backend.name for backend in op.backends]
        for name in implementations or [one for one in declared if one in KERNEL_BACKENDS]:
            if builds.backend_of(name) not in declared:
                continue
            for dtype in dtypes or (None,):
                yield from _of_implementation(op, matching[op.name], name, dtype, hardware, bool(patterns), on_note)


def _of_implementation(
    op: Op,
    cases: Sequence[Case],
    name: str,
    wanted: torch.dtype | None,
    hardware: Device,
    every: bool,
    on_note: Callable[[str], None],
) -> Iterator[Target]:
    """Yields the targets of one operator and implementation: all supported cases, or the most representative ones."""
    if not every and cases:
        cases = by_preference(op, cases, wanted or default_dtype(cases[0], name, hardware))
    reasons, forward = [], False
    for case in cases:
        dtype = wanted or default_dtype(case, name, hardware)
        reason = selection.declined(op, case, dtype, hardware, name)
        if reason is not None:
            reasons.append(reason)
            continue
        target = Target(op.name, case.name, str(dtype).removeprefix("torch."), name)
        backward = not every and target.directions() != ["fwd"]
        if every or backward or not forward:
            yield target
        forward = True
        if backward:
            return
    if len(reasons) == len(cases):
        on_note(f"{op.name}: {name} left out: {reasons[0] if reasons else 'no case matches'}")


@cache
def passes(gpu: str) -> frozenset[Pass]:
    """All passes that `select` finds for a GPU, of every operator on every backend that launches kernels.

    Args:
        gpu: its name, as results files have it.

    Raises:
        ValueError: the GPU is none of `core.device.KNOWN`.
    """
    from flashkernel.core.device import KNOWN
    from flashkernel.ops import registry

    hardware = next((one for one in KNOWN.values() if one.name == gpu), None)
    if hardware is None:
        raise ValueError(f"{gpu} is no known GPU; there are {', '.join(one.name for one in KNOWN.values())}")
    targets = select(list(registry().values()), None, None, None, hardware)
    found = ((target.op, target.implementation, _pass(one)) for target in targets for one in target.directions())
    return frozenset(found)


def pass_of(record: ProfileRecord) -> Pass:
    """What a record profiles; a whole step has the backward's kernels."""
    return record.op, record.implementation, _pass(record.direction)


def _pass(direction: str) -> str:
    return "fwd" if direction == "fwd" else "bwd"


def profiled(profiles: Iterable[Mapping[str, Any]], tools: Collection[str] = ("ncu",)) -> list[ProfileRecord]:
    """The records of saved profiles by one of these tools; cases of which a direction failed are left out.

    Args:
        profiles: files of profiles, as `results.load` returns them.
        tools: profilers that count.
    """
    records = [record for file in profiles for record in file["records"] if isinstance(record, ProfileRecord)]
    failed = {(record.key, record.implementation) for record in records if record.error is not None}
    return [one for one in records if one.tool in tools and (one.key, one.implementation) not in failed]


def missing(targets: Sequence[Target], done: Iterable[ProfileRecord], *fields: str) -> list[Target]:
    """The targets of which a pass has no record in `done` that agrees in operator, implementation and these fields.

    Args:
        targets: what is to be profiled.
        done: what is profiled.
        fields: "case", "dtype": which a record must share; else a record of any case and dtype is enough.
    """
    agreed = attrgetter("op", "implementation", *fields)
    found = {(agreed(record), _pass(record.direction)) for record in done}
    return [target for target in targets
            if any((agreed(target), _pass(one)) not in found for one in target.directions())]  # fmt: skip


def default_dtype(case: Case, implementation: str, hardware: Device) -> torch.dtype:
    """The case's first dtype; float16 instead of bfloat16 on an architecture, or for a build, without it."""
    arch = builds.BUILDS.get(implementation, hardware.arch)
    first = case.dtypes[0]
    return torch.float16 if first == torch.bfloat16 and hardware.kind == "cuda" and arch < 80 else first


def records(target: Target, outcome: Outcome, tool: str, ceilings: Ceilings) -> list[ProfileRecord]:
    """The records of a target, one for each direction; a direction that failed has the error."""
    op, case, dtype = target.resolve()
    empty = ProfileRecord(op.name, case.name, dict(case.axes), target.dtype, "fwd", target.implementation, tool)
    costs, found = op.cost(case, dtype), []
    for direction, kernels in outcome.kernels.items():
        cost, ms = costs[direction], sum(kernel.duration_us for kernel in kernels) / 1e3
        intensity = cost.flops / max(cost.bytes, 1.0)
        record = replace(empty, direction=direction, flops=cost.flops, bytes=cost.bytes, intensity=intensity)
        if ms > 0:
            point = roofline.point(cost.flops, cost.bytes, ms, dtype, ceilings)
            rates = asdict(point)  # tflops, tbs, roof, bound
            found.append(replace(record, kernels=tuple(kernels), ms=ms, **rates))
        else:
            found.append(replace(record, error="the profiler reported no kernel"))
    if outcome.error is not None:
        failed = next((name for name in bench.directions_of(op, case, dtype) if name not in outcome.kernels), "fwd")
        found.append(replace(empty, direction=failed, error=outcome.error))
    return found
