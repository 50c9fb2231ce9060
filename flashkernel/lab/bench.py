"""The operator benchmark: checks and times every backend and every baseline that supports a case.

Each implementation is checked against the reference in the same run before it is timed. A wrong one is timed too, but
its record says so and its times are not compared. Calls rotate over several input sets so that the L2 cache is cold;
all implementations get the same values. One that raises or runs out of memory gives a record with an `error`.
"""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch

from flashkernel.core import check, roofline, timing
from flashkernel.core.device import properties
from flashkernel.core.op import Baseline, Case, Op, resolve
from flashkernel.lab import builds, selection
from flashkernel.lab.results import STATISTICS, Record
from flashkernel.lab.verification import Verifier

DIRECTIONS = ("fwd", "bwd", "fwd+bwd")
MEMORY_SHARE = 0.25  # of the free memory: limit of the rotating input sets
CACHED_SHARE = 0.3  # of the GPU's memory: what torch's allocator may hold from one implementation to the next

Inputs = Mapping[str, torch.Tensor]
Function = Callable[..., Any]
Log = Callable[[str], None]


class DeviceLostError(RuntimeError):
    """The CUDA context is unusable after an error; only a new process can use the GPU again."""


@dataclass(frozen=True)
class BenchOptions:
    """What to measure and how.

    Args:
        device: where to run.
        ceilings: measured bandwidth and FLOP rates; without them records have no rates and no percent of the roof.
        directions: a subset of `DIRECTIONS`; None for all that the operator has.
        implementations: names of backends, of builds such as "cuda_sm75", and of baselines; None for all but the
            reference and the builds.
        budget_s: seconds of timing for each measurement.
        baselines: timed in addition to those that the operator declares.
        verifier: remembers the checks of the run.
        on_progress: called with what is about to be measured.
        on_note: called with what is left out, and why.
    """

    device: torch.device
    ceilings: roofline.Ceilings | None = None
    directions: Sequence[str] | None = None
    implementations: Sequence[str] | None = None
    budget_s: float = 1.0
    baselines: Sequence[Baseline] = ()
    verifier: Verifier = field(default_factory=Verifier)
    on_progress: Log = lambda text: None
    on_note: Log = lambda text: None

    def selects(self, name: str, default: bool) -> bool:
        """True if an implementation is asked for by name or, where none is named, runs by default."""
        return name in self.implementations if self.implementations else default


@dataclass(frozen=True)
class Candidate:
    """An implementation to be timed: a function of the operator's inputs and options."""

    name: str
    kind: str  # "backend" or "baseline"
    function: Function
    options: Mapping[str, Any]  # those passed to the call; a baseline may have bound some when it was built
    checked: str | Function  # the `implementation` argument of check.verify
    forward_only: bool = False


def bench(op: Op, case: Case, dtype: torch.dtype, options: BenchOptions) -> Iterator[Record]:
    """Times every implementation of one case; yields records as they are measured.

    Args:
        op: the operator.
        case: sizes and options of the call.
        dtype: dtype of the inputs.
        options: device, directions, implementations and time budget.
    """
    possible = [name for name in directions_of(op, case, dtype) if name in (options.directions or DIRECTIONS)]
    sets: list[Inputs] | None = None
    for candidate in candidates(op, case, dtype, options) if possible else ():
        directions = [name for name in possible if name == "fwd" or not candidate.forward_only]
        if not directions:
            options.on_note(f"{op.name}: {candidate.name} left out: it has no backward pass")
            continue
        _reset(options.device)
        empty = _empty_record(op, case, dtype, candidate)
        verify = partial(_verify, op, case, dtype, candidate, directions, options)
        failure, reports = _attempt(partial(_as_built, candidate, verify))
        if failure is None and sets is None:
            failure, sets = _attempt(partial(input_sets, op, case, dtype, options.device))
        if failure is not None or sets is None:
            yield from (replace(empty, direction=direction, error=failure) for direction in directions)
            continue
        for direction in directions:
            options.on_progress(f"{op.name} {case.name} {empty.dtype} {direction}: {candidate.name}")
            wrong = [report.message for report in reports if not report.ok and _affects(report, direction)]
            record = replace(empty, direction=direction, correct=not wrong, note=wrong[0] if wrong else None)
            failure, timed = _attempt(
                partial(_as_built, candidate, partial(_timed, record, op, case, dtype, candidate, sets, options))
            )
            yield timed if failure is None else replace(record, error=failure)
        if candidate.kind == "baseline":  # some overwrite their inputs; the next one gets new sets of the same values
            sets = None
    del sets
    options.verifier.forget_expected()
    _reset(options.device)


def directions_of(op: Op, case: Case, dtype: torch.dtype) -> list[str]:
    """The directions a case is timed in; "fwd+bwd" replaces "bwd" where the operator declares its cost."""
    priced = op.cost(case, dtype)
    differentiable = check.wanted_gradients(op, case, selection.shapes_only(op, case, dtype))
    found = [name for name in DIRECTIONS if name in priced and (name == "fwd" or differentiable)]
    return [name for name in found if name != "bwd" or "fwd+bwd" not in found]


def input_sets(op: Op, case: Case, dtype: torch.dtype, device: torch.device) -> list[Inputs]:
    """As many input sets as keep the L2 cache cold, within the free memory."""
    sets: list[Inputs] = [op.make_inputs(case, dtype, device, seed=0)]
    size = sum(value.nbytes for value in sets[0].values())
    wanted = min(timing.rotation(size, device), max(1, int(_allowance(device) // max(1, size))))
    return sets + [op.make_inputs(case, dtype, device, seed) for seed in range(1, wanted)]


def candidates(op: Op, case: Case, dtype: torch.dtype, options: BenchOptions) -> Iterator[Candidate]:
    """Yields our backends, the one that dispatch picks first, then builds that are asked for, then the baselines."""
    kind = options.device.type
    answer = selection.explain_case(op, case, dtype, properties(options.device))
    for verdict in sorted(answer.verdicts, key=lambda verdict: verdict.backend != answer.chosen):
        if all(backend.name != verdict.backend for backend in op.backends):
            continue  # of an operator that this one calls
        # On a CPU Triton runs in its interpreter, which is for tests; its times mean nothing.
        named = op.backend(verdict.backend)
        default = named.name != "reference" and (kind == "cuda" or kind in named.auto_devices)
        if not options.selects(verdict.backend, default):
            continue
        if verdict.reason is not None:
            options.on_note(f"{op.name}: {verdict.backend} left out: {verdict.reason}")
            continue
        function = partial(op.call, backend=verdict.backend)
        yield Candidate(verdict.backend, "backend", function, case.options, verdict.backend)
    yield from _builds(op, case, dtype, options)
    for baseline in (*op.baselines, *options.baselines):
        slow_to_build = baseline.name == "compile" and kind == "cpu"
        if slow_to_build and not options.implementations:
            options.on_note("compile left out: torch.compile takes minutes on a CPU; select it with --impl compile")
        if not options.selects(baseline.name, not slow_to_build):
            continue
        try:
            function = resolve(baseline.target)(op, case)
        except ImportError as error:
            options.on_note(f"{baseline.name} left out: it is not installed ({error})")
        except ValueError as error:
            options.on_note(f"{op.name} {case.name}: {baseline.name} left out: {error}")
        except Exception as error:  # a baseline that fails to load; its record has the error
            broken = partial(_raise, error)
            yield Candidate(baseline.name, "baseline", broken, {}, broken)
        else:
            taken = _options_taken(function, case.options)
            dropped = set(case.options) - set(taken)
            checked = partial(_without, getattr(function, "checked", function), dropped)
            yield Candidate(baseline.name, "baseline", function, taken, checked, baseline.forward_only)


def _builds(op: Op, case: Case, dtype: torch.dtype, options: BenchOptions) -> Iterator[Candidate]:
    """Yields the builds for older architectures that are asked for by name."""
    for name in builds.BUILDS:
        if not options.selects(name, False) or all(backend.name != builds.CUDA for backend in op.backends):
            continue
        reason = selection.declined(op, case, dtype, properties(options.device), name)
        if reason is not None:
            options.on_note(f"{op.name}: {name} left out: {reason}")
            continue
        function = partial(op.call, backend=builds.CUDA)
        yield Candidate(name, "backend", function, case.options, builds.CUDA)


def _as_built(candidate: Candidate, work: Callable[[], Any]) -> Any:
    """Runs `work` with CUDA C++ kernels built as the candidate's name says."""
    with builds.build(candidate.name):
        return work()


def _options_taken(function: Function, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options that a baseline has parameters for."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return options
    return {name: value for name, value in options.items() if name in parameters}


def _without(function: Function, dropped: set[str], **given: Any) -> Any:
    return function(**{name: value for name, value in given.items() if name not in dropped})


def _empty_record(op: Op, case: Case, dtype: torch.dtype, candidate: Candidate) -> Record:
    name = str(dtype).removeprefix("torch.")
    return Record(op.name, case.name, dict(case.axes), name, "fwd", candidate.name, candidate.kind, correct=False)


def _verify(
    op: Op, case: Case, dtype: torch.dtype, candidate: Candidate, directions: Sequence[str], options: BenchOptions
) -> list[check.Report]:
    options.on_progress(f"{op.name} {case.name} {str(dtype).removeprefix('torch.')}: checking {candidate.name}")
    small = case.at(**case.check_axes)
    prepare = partial(_first_call, op, small, dtype, candidate, directions, options)
    with _keeping_buffers("bwd" if "bwd" in directions else "fwd"):
        return options.verifier.verify(
            op, small, dtype, candidate.name, candidate.checked, options.device,
            gradients=list(directions) != ["fwd"], prepare=prepare,
        )  # fmt: skip


def _first_call(
    op: Op, small: Case, dtype: torch.dtype, candidate: Candidate, directions: Sequence[str], options: BenchOptions
) -> None:
    """Calls a baseline, which may compile; that must not happen under the check's poisoned memory."""
    if candidate.kind != "baseline":
        return
    inputs = op.make_inputs(small, dtype, options.device)
    function = partial(candidate.function, **candidate.options)
    wanted = check.wanted_gradients(op, small, inputs) if list(directions) != ["fwd"] else []
    if "bwd" in directions:
        _backward(function, inputs, wanted, 0)()
    elif wanted:
        _whole_step(function, inputs, wanted, 0)()
    else:
        function(**inputs)


def _affects(report: check.Report, direction: str) -> bool:
    """True if a report concerns a direction: outputs concern all directions, gradients all but the forward."""
    return direction != "fwd" or report.name.startswith("output")


def _timed(
    record: Record,
    op: Op,
    case: Case,
    dtype: torch.dtype,
    candidate: Candidate,
    sets: Sequence[Inputs],
    options: BenchOptions,
) -> Record:
    """Returns the record with times, rates and peak memory."""
    wanted = check.wanted_gradients(op, case, sets[0]) if record.direction != "fwd" else []
    function = partial(candidate.function, **candidate.options)
    build = partial(build_calls, function, record.direction, sets, wanted, options.device)
    with torch.no_grad() if record.direction == "fwd" else _keeping_buffers(record.direction):
        measured = timing.measure(build=build, device=options.device, budget_s=options.budget_s)
        peak = None
        if options.device.type == "cuda":
            (call,) = build(most=1)
            call()  # workspaces that are allocated once do not count
            peak = timing.peak_bytes(call, options.device)
    placed: dict[str, Any] = {}
    if options.ceilings is not None:
        cost = op.cost(case, dtype)[record.direction]
        placed = asdict(roofline.point(cost.flops, cost.bytes, measured.p50, dtype, options.ceilings))
    return replace(
        record,
        ms={name: getattr(measured, name) for name in STATISTICS},
        peak_bytes=peak,
        mode=measured.mode,
        note="; ".join(text for text in (record.note, *measured.notes) if text) or None,
        **placed,  # tflops, tbs, roof, bound
    )


def build_calls(
    function: Function,
    direction: str,
    sets: Sequence[Inputs],
    wanted: Sequence[str],
    device: torch.device,
    most: int | None = None,
) -> list[timing.Call]:
    """Returns one call per input set. A backward call runs its forward here, on the stream that is timed."""
    if direction == "fwd":
        return [partial(function, **inputs) for inputs in sets[:most]]
    make = _backward if direction == "bwd" else _whole_step
    start, allowance = _allocated(device), _allowance(device)
    calls = [make(function, sets[0], wanted, 0)]
    each = max(1, _allocated(device) - start)  # bytes saved for the backward of one set
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
    """Gradients of the outputs: random and equal for all implementations; 1 for a scalar loss."""
    generator = torch.Generator(roots[0].device).manual_seed(seed)
    return [
        torch.randn(root.shape, generator=generator, device=root.device).to(root.dtype)
        if root.ndim
        else torch.ones_like(root)
        for root in roots
    ]


def _keeping_buffers(direction: str) -> AbstractContextManager[Any]:
    """Keeps torch.compile from donating saved tensors to the backward, which is run repeatedly."""
    if direction != "bwd":
        return nullcontext()
    from torch._functorch import config

    return config.patch(donated_buffer=False)


def _attempt(work: Callable[[], Any]) -> tuple[str | None, Any]:
    """Returns (None, result), or (the error, None)."""
    try:
        return None, work()
    except torch.OutOfMemoryError as error:
        return f"out of memory: {_summary(error)}", None
    except Exception as error:  # third-party code may raise anything; the record keeps it
        return f"{type(error).__name__}: {_summary(error)}", None


def _raise(error: Exception, **inputs: Any) -> Any:
    raise error


def _summary(error: BaseException) -> str:
    """The first two lines of a message: compilers put the cause into the second."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:300] or "no message"


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _allowance(device: torch.device) -> float:
    """Bytes that further input sets may use."""
    if device.type != "cuda":
        return 0.0  # one input set on a CPU: its caches are not flushed
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # held by torch's allocator
    return MEMORY_SHARE * (torch.cuda.mem_get_info(device)[0] + unused)


def _reset(device: torch.device) -> None:
    """Frees the memory of the last implementation and clears dynamo's cache, which has a limit of recompilations.

    torch's allocator keeps some: to get memory from the driver again takes longer than most measurements.
    """
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    free_memory(device, CACHED_SHARE)


def free_memory(device: torch.device, kept: float = 0.0) -> None:
    """Collects garbage, and empties the allocator's cache where it is above `kept`, a share of the GPU's memory.

    Raises DeviceLostError where the CUDA context is unusable.
    """
    gc.collect()
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
        if torch.cuda.memory_reserved(device) > kept * torch.cuda.mem_get_info(device)[1]:
            torch.cuda.empty_cache()
    except RuntimeError as error:
        raise DeviceLostError(f"this process can no longer use the GPU: {_summary(error)}") from None


@contextmanager
def frozen_objects() -> Iterator[None]:
    """Inside, the garbage collector passes over all objects that are alive now.

    To scan the modules of torch and its compiler after each implementation takes longer than to time one. A caller that
    froze its objects keeps them frozen.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
