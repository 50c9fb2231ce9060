"""Random calls of operators, drawn from their declarations; every backend that supports a call is checked.

A call is identified by its operator, a seed and a size class; `Call.command` repeats it on any machine.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from flashkernel.core import check, env, replay
from flashkernel.core.dispatch import explain
from flashkernel.core.op import Case, Op
from flashkernel.core.random_case import GROUP, describe, draw
from flashkernel.core.worker_pool import WorkerPool
from flashkernel.lab.checks import interpreter_limit

DRAWS = 8  # input sets that torch's own error is measured on


@dataclass(frozen=True)
class Call:
    """One random call, made `repeats` times with other values: from the third time on it is replayed (core/replay.py),
    by the C++ extension from the fifth."""

    op: str
    seed: int
    sizes: str
    repeats: int = 1

    def command(self, backends: Sequence[str] = ()) -> str:
        """The command line that repeats it."""
        prefix = "TRITON_INTERPRET=1 " if env.interpreting() else ""
        chosen = "".join(f" --backend {name}" for name in backends)
        repeats = f" --repeats {self.repeats}" if self.repeats > 1 else ""
        return f"{prefix}flashkernel check --random --seed {self.seed} --sizes {self.sizes}{repeats}{chosen} {self.op}"


@dataclass(frozen=True)
class CallOutcome:
    """The result of a random call.

    `status` is "passed", "failed", or "refused" where no backend but torch supports the call. `checked` are the
    backends that ran; `failures` has a message for each that failed.
    """

    call: Call
    case: str
    status: str
    checked: tuple[str, ...] = ()
    failures: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    command: str = ""
    worker_is_broken: bool = False  # the CUDA context is unusable after the call

    def as_dict(self) -> dict[str, Any]:
        found = {**asdict(self), **asdict(self.call), "checked": " ".join(self.checked)}
        return {name: value for name, value in found.items() if name not in ("call", "worker_is_broken")}


def schedule(
    ops: Sequence[Op], seed: int, sizes: str, calls: int | None, repeats: int = 1
) -> Iterator[list[Call]]:  # fmt: skip
    """Yields batches of calls, endlessly or `calls` calls: operators alternate, each as often as its `random_share`.

    The calls of a batch share compiled kernels, so one process should run them.
    """
    batch = GROUP if sizes == "large" else 1
    cycle = [op for index in range(max(op.random_share for op in ops)) for op in ops if op.random_share > index]
    next_seed = dict.fromkeys(cycle, seed)
    for op in itertools.cycle(cycle):
        until = (next_seed[op] // batch + 1) * batch
        if calls is not None:
            until = min(until, next_seed[op] + calls)
        found = [Call(op.name, number, sizes, repeats) for number in range(next_seed[op], until)]
        next_seed[op] = until
        if calls is not None:
            calls -= len(found)
        yield found
        if calls == 0:
            return


def run(
    batches: Iterator[Sequence[Call]], device: torch.device, backends: Sequence[str], workers: int, timeout_s: float
) -> Iterator[CallOutcome]:
    """Yields the outcomes of calls that worker processes run, in any order; a process that dies or hangs failed."""
    pool = WorkerPool(_in_worker, (str(device), tuple(backends)), workers, timeout_s)
    for call, outcome, reason in pool.run(batches):
        yield outcome if outcome is not None else _lost(call, backends, reason)


def run_one(call: Call, device: torch.device, backends: Sequence[str] = ()) -> CallOutcome:
    """Draws a call and checks it in this process, on the named backends or on all that support it."""
    from flashkernel.ops import registry

    start = time.perf_counter()
    op = registry()[call.op]
    case, dtype = draw(op, call.seed, call.sizes, device)
    text, command = describe(case, dtype), call.command(backends)
    checked: list[str] = []
    failures: dict[str, str] = {}
    try:
        inputs = op.make_inputs(case, dtype, device, call.seed, "cpu")
        for name in check.wanted_gradients(op, case, inputs):  # some backends have none of a call that they support
            inputs[name].requires_grad_()
        verdicts = explain(op.call, **inputs, **case.options).verdicts
    except Exception as error:  # an argument check that rejects what the reference accepts
        failures["arguments"] = f"{type(error).__name__}: {error}"
        verdicts = ()
    for verdict in verdicts:
        if verdict.backend == "reference" or (backends and verdict.backend not in backends):
            continue
        if verdict.reason or interpreter_limit(verdict.backend, dtype, device):
            continue
        checked.append(verdict.backend)
        with replay.recorded_after(1) if call.repeats > 1 else nullcontext():
            for number in range(call.repeats):
                wrong = _wrong(op, case, dtype, verdict.backend, device, call.seed + number)
                if wrong:
                    failures[verdict.backend] = wrong if call.repeats == 1 else f"call {number + 1}: {wrong}"
                    break
    status = "failed" if failures else "passed" if set(checked) - {"torch"} else "refused"
    seconds = time.perf_counter() - start
    return CallOutcome(call, text, status, tuple(checked), failures, seconds, command,
                       worker_is_broken=bool(failures) and _context_is_lost(device))  # fmt: skip


def _wrong(op: Op, case: Case, dtype: torch.dtype, backend: str, device: torch.device, seed: int) -> str:
    """The errors of a backend's result; "" where it is right."""
    try:
        reports = check.verify(op, case, dtype, backend, device, seed=seed, draws=DRAWS)
    except Exception as error:  # the kernel under test may raise anything
        return f"{type(error).__name__}: {error}"
    return "; ".join(report.message for report in reports if not report.ok)


def _context_is_lost(device: torch.device) -> bool:
    """True if the CUDA context is unusable, as after an illegal memory access."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def _in_worker(device: str, backends: tuple[str, ...], call: Call) -> CallOutcome:
    torch.set_num_threads(1)  # one worker per core
    warnings.simplefilter("ignore")  # from masked lanes in Triton's interpreter
    return run_one(call, torch.device(device), backends)


def _lost(call: Call, backends: Sequence[str], reason: str) -> CallOutcome:
    from flashkernel.ops import registry

    case = describe(*draw(registry()[call.op], call.seed, call.sizes))
    return CallOutcome(call, case, "failed", (), {"process": reason}, command=call.command(backends))
