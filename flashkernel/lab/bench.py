"""The benchmark: every backend and every baseline that can do a case, checked and then timed side by side.

For each implementation the check comes first, in the same run; a wrong one is still timed, but its record says so and
its times claim nothing. Input sets rotate so that the L2 cache is cold, and all implementations see equal ones. One
that fails or runs out of memory becomes a record with an `error`; the others go on.
"""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from flashkernel.core import check, roofline, timing
from flashkernel.core.device import facts
from flashkernel.core.op import Case, Op, resolve
from flashkernel.lab import selection
from flashkernel.lab.results import STATISTICS, Record

DIRECTIONS = ("fwd", "bwd", "fwd+bwd")
MEMORY_SHARE = 0.25  # of the free memory: the most that rotating inputs may take

Inputs = Mapping[str, torch.Tensor]
Function = Callable[..., Any]
Tell = Callable[[str], None]


class DeviceLostError(RuntimeError):
    """An implementation left the GPU in a state that only a new process can leave."""


@dataclass(frozen=True)
class Settings:
    """How a run measures; by default all implementations that can, but not the reference."""

    device: torch.device
    ceilings: roofline.Ceilings | None = None  # without them nothing is placed under a roof
    directions: Sequence[str] | None = None
    implementations: Sequence[str] | None = None
    budget_s: float = 1.0
    step: Tell = lambda text: None  # hears what is about to be measured
    note: Tell = lambda text: None  # hears what is left out, and why

    def wants(self, name: str, automatic: bool) -> bool:
        return name in self.implementations if self.implementations else automatic


@dataclass(frozen=True)
class Candidate:
    """An implementation to be timed: a function of the operator's inputs and options."""

    name: str
    kind: str  # "backend" or "baseline"
    function: Function
    options: Mapping[str, Any]  # those to be passed: a baseline is made for its case, and may have bound them
    checked: str | Function  # as check.verify wants it
    forward_only: bool = False


def bench(op: Op, case: Case, dtype: torch.dtype, settings: Settings) -> Iterator[Record]:
    """Time every implementation of one case; records come as they are measured."""
    possible = [name for name in directions_of(op, case, dtype) if name in (settings.directions or DIRECTIONS)]
    candidates = list(_candidates(op, case, dtype, settings)) if possible else []
    for candidate in candidates:
        directions = [name for name in possible if name == "fwd" or not candidate.forward_only]
        if not directions:
            settings.note(f"{op.name}: {candidate.name} left out: it has no backward pass")
            continue
        _tidy(settings.device)
        blank = _blank(op, case, dtype, candidate)
        failure, reports = _attempt(partial(_verify, op, case, dtype, candidate, directions, settings))
        if failure is None:  # the same values each time, drawn anew: some peers write to their inputs
            failure, sets = _attempt(partial(input_sets, op, case, dtype, settings.device))
        if failure is not None:
            yield from (replace(blank, direction=direction, error=failure) for direction in directions)
            continue
        for direction in directions:
            settings.step(f"{op.name} {case.name} {blank.dtype} {direction}: {candidate.name}")
            wrong = [report.message for report in reports if not report.ok and _concerns(report, direction)]
            record = replace(blank, direction=direction, correct=not wrong, note=wrong[0] if wrong else None)
            failure, timed = _attempt(partial(_timed, record, op, case, dtype, candidate, sets, settings))
            yield timed if failure is None else replace(record, error=failure)
        del sets
    _tidy(settings.device)


def directions_of(op: Op, case: Case, dtype: torch.dtype) -> list[str]:
    """The directions a case is timed in: the whole step, where the operator prices it, stands for the backward."""
    priced = op.cost(case, dtype)
    differentiable = check.wanted_gradients(op, case, selection.shapes_only(op, case, dtype))
    found = [name for name in DIRECTIONS if name in priced and (name == "fwd" or differentiable)]
    return [name for name in found if name != "bwd" or "fwd+bwd" not in found]


def input_sets(op: Op, case: Case, dtype: torch.dtype, device: torch.device) -> list[Inputs]:
    """Enough input sets to keep the L2 cache cold, within the memory there is."""
    sets: list[Inputs] = [op.make_inputs(case, dtype, device, seed=0)]
    size = sum(value.nbytes for value in sets[0].values())
    wanted = min(timing.rotation(size, device), max(1, int(_allowance(device) // max(1, size))))
    return sets + [op.make_inputs(case, dtype, device, seed) for seed in range(1, wanted)]


def _candidates(op: Op, case: Case, dtype: torch.dtype, settings: Settings) -> Iterator[Candidate]:
    """Ours first, the backend that dispatch would pick before the others; then the baselines."""
    kind = settings.device.type
    answer = selection.question(op, case, dtype, facts(settings.device))
    for verdict in sorted(answer.verdicts, key=lambda verdict: verdict.backend != answer.chosen):
        # On a CPU Triton runs in its interpreter, in tests only: to time that says nothing.
        named = op.backend(verdict.backend)
        automatic = named.name != "reference" and (kind == "cuda" or kind in named.auto_devices)
        if not settings.wants(verdict.backend, automatic):
            continue
        if verdict.reason is not None:
            settings.note(f"{op.name}: {verdict.backend} left out: {verdict.reason}")
            continue
        function = partial(op.call, backend=verdict.backend)
        yield Candidate(verdict.backend, "backend", function, case.options, verdict.backend)
    for baseline in op.baselines:
        slow_to_build = baseline.name == "compile" and kind == "cpu"
        if slow_to_build and not settings.implementations:
            settings.note("compile left out: it takes long to build on a CPU; ask for it with --impl compile")
        if not settings.wants(baseline.name, not slow_to_build):
            continue
        try:
            function = resolve(baseline.target)(op, case)
        except ImportError as error:
            settings.note(f"{baseline.name} left out: it is not installed ({error})")
        except ValueError as error:
            settings.note(f"{op.name} {case.name}: {baseline.name} left out: {error}")
        except Exception as error:  # a peer that breaks while it loads: its record will say so
            broken = partial(_raise, error)
            yield Candidate(baseline.name, "baseline", broken, {}, broken)
        else:
            taken = _options_taken(function, case.options)
            dropped = set(case.options) - set(taken)
            checked = partial(_without, function, dropped)
            yield Candidate(baseline.name, "baseline", function, taken, checked, baseline.forward_only)


def _options_taken(function: Function, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options that a baseline has parameters for."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return options
    return {name: value for name, value in options.items() if name in parameters}


def _without(function: Function, dropped: set[str], **given: Any) -> Any:
    return function(**{name: value for name, value in given.items() if name not in dropped})


def _blank(op: Op, case: Case, dtype: torch.dtype, candidate: Candidate) -> Record:
    name = str(dtype).removeprefix("torch.")
    return Record(op.name, case.name, dict(case.axes), name, "fwd", candidate.name, candidate.kind, correct=False)


def _verify(
    op: Op, case: Case, dtype: torch.dtype, candidate: Candidate, directions: Sequence[str], settings: Settings
) -> list[check.Report]:
    settings.step(f"{op.name} {case.name} {str(dtype).removeprefix('torch.')}: checking {candidate.name}")
    small = case.at(**case.check_axes)
    with _keeping_buffers("bwd" if "bwd" in directions else "fwd"):
        return _checked(op, small, dtype, candidate, directions, settings)


def _checked(
    op: Op, small: Case, dtype: torch.dtype, candidate: Candidate, directions: Sequence[str], settings: Settings
) -> list[check.Report]:
    if candidate.kind == "baseline":  # what it compiles at its first call must not meet the check's poisoned memory
        inputs = op.make_inputs(small, dtype, settings.device)
        function = partial(candidate.function, **candidate.options)
        wanted = check.wanted_gradients(op, small, inputs) if list(directions) != ["fwd"] else []
        if "bwd" in directions:
            _backward(function, inputs, wanted, 0)()
        elif wanted:
            _whole_step(function, inputs, wanted, 0)()
        else:
            function(**inputs)
    return check.verify(op, small, dtype, candidate.checked, settings.device, gradients=list(directions) != ["fwd"])


def _concerns(report: check.Report, direction: str) -> bool:
    """A forward pass answers for the outputs, named "output...", every other direction for the gradients too."""
    return direction != "fwd" or report.name.startswith("output")


def _timed(
    record: Record,
    op: Op,
    case: Case,
    dtype: torch.dtype,
    candidate: Candidate,
    sets: Sequence[Inputs],
    settings: Settings,
) -> Record:
    """The record with its times, rates and peak memory."""
    wanted = check.wanted_gradients(op, case, sets[0]) if record.direction != "fwd" else []
    function = partial(candidate.function, **candidate.options)
    build = partial(_build, function, record.direction, sets, wanted, settings.device)
    with torch.no_grad() if record.direction == "fwd" else _keeping_buffers(record.direction):
        measured = timing.measure(build=build, device=settings.device, budget_s=settings.budget_s)
        peak = None
        if settings.device.type == "cuda":
            (call,) = build(most=1)
            call()  # workspaces that are made once are not part of the call
            peak = timing.peak_bytes(call, settings.device)
    placed: dict[str, Any] = {}
    if settings.ceilings is not None:
        cost = op.cost(case, dtype)[record.direction]
        placed = asdict(roofline.place(cost.flops, cost.bytes, measured.p50, dtype, settings.ceilings))
    return replace(
        record,
        ms={name: getattr(measured, name) for name in STATISTICS},
        peak_bytes=peak,
        mode=measured.mode,
        note="; ".join(text for text in (record.note, *measured.notes) if text) or None,
        **placed,  # tflops, tbs, roof, bound
    )


def _build(
    function: Function,
    direction: str,
    sets: Sequence[Inputs],
    wanted: Sequence[str],
    device: torch.device,
    most: int | None = None,
) -> list[timing.Call]:
    """A rotation of calls; a backward pass runs its forward here, so on the stream that will be timed."""
    if direction == "fwd":
        return [partial(function, **inputs) for inputs in sets[:most]]
    make = _backward if direction == "bwd" else _whole_step
    start, allowance = _allocated(device), _allowance(device)
    calls = [make(function, sets[0], wanted, 0)]
    each = max(1, _allocated(device) - start)  # what a set keeps for its backward
    count = min(len(sets[:most]), max(1, int(allowance // each)))
    return calls + [make(function, sets[seed], wanted, seed) for seed in range(1, count)]


def _backward(function: Function, inputs: Inputs, wanted: Sequence[str], seed: int) -> timing.Call:
    leaves = _leaves(inputs, wanted)
    roots = _roots(function(**leaves))
    targets = [leaves[name] for name in wanted]
    cotangents = _cotangents(roots, seed)
    return lambda: torch.autograd.grad(roots, targets, cotangents, retain_graph=True, allow_unused=True)


def _whole_step(function: Function, inputs: Inputs, wanted: Sequence[str], seed: int) -> timing.Call:
    leaves = _leaves(inputs, wanted)
    targets = [leaves[name] for name in wanted]
    cotangents = _cotangents(_roots(function(**leaves)), seed)
    return lambda: torch.autograd.grad(_roots(function(**leaves)), targets, cotangents, allow_unused=True)


def _leaves(inputs: Inputs, wanted: Sequence[str]) -> dict[str, torch.Tensor]:
    return {name: value.detach().requires_grad_(name in wanted) for name, value in inputs.items()}


def _roots(outputs: Any) -> list[torch.Tensor]:
    return [value for value in check.named(outputs).values() if value.requires_grad]


def _cotangents(roots: Sequence[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """Random, the same for every implementation; 1 for a scalar, as a training step has it."""
    generator = torch.Generator(roots[0].device).manual_seed(seed)
    return [
        torch.randn(root.shape, generator=generator, device=root.device).to(root.dtype)
        if root.ndim
        else torch.ones_like(root)
        for root in roots
    ]


def _keeping_buffers(direction: str) -> AbstractContextManager[Any]:
    """To repeat a backward, torch.compile must not reuse the memory of what the forward saved."""
    if direction != "bwd":
        return nullcontext()
    from torch._functorch import config

    return config.patch(donated_buffer=False)


def _attempt(work: Callable[[], Any]) -> tuple[str | None, Any]:
    """(None, result), or (what went wrong, None)."""
    try:
        return None, work()
    except torch.OutOfMemoryError as error:
        return f"out of memory: {_gist(error)}", None
    except Exception as error:  # somebody else's code on any shape: whatever it raises is a finding
        return f"{type(error).__name__}: {_gist(error)}", None


def _raise(error: Exception, **inputs: Any) -> Any:
    raise error


def _gist(error: BaseException) -> str:
    """The first two lines: compilers put the cause into the second."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:300] or "no message"


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _allowance(device: torch.device) -> float:
    """Bytes that further input sets may take."""
    if device.type != "cuda":
        return 0.0  # a CPU's caches are not rotated out
    return MEMORY_SHARE * torch.cuda.mem_get_info(device)[0]


def _tidy(device: torch.device) -> None:
    """Give back what the last implementation held, and forget what was compiled: recompiles have a limit."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except RuntimeError as error:
        raise DeviceLostError(f"the GPU is lost to this process: {_gist(error)}") from None
