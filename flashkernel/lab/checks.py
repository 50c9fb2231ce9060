"""Runs the declared test cases of operators on this machine, for every dtype and every backend that supports them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from flashkernel.core import check, env
from flashkernel.core.device import properties
from flashkernel.core.op import Case, Op
from flashkernel.lab import selection


@dataclass(frozen=True)
class Task:
    """One check to be run."""

    op: Op
    case: Case
    dtype: torch.dtype
    backend: str

    def __str__(self) -> str:
        return f"{self.op.name} {self.case.name} {str(self.dtype).removeprefix('torch.')} {self.backend}"


@dataclass(frozen=True)
class Outcome:
    """The result of a check: status is "passed", "failed", or "declined" where the backend cannot run the case."""

    op: str
    case: str
    dtype: str
    backend: str
    status: str
    share: float | None = None  # largest error / allowed error
    message: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def tasks(
    op: Op,
    cases: Sequence[Case],
    dtypes: Sequence[torch.dtype] | None,
    backends: Sequence[str] | None,
    device: torch.device,
) -> Iterator[Task | Outcome]:
    """Yields the checks to run; a backend named in `backends` that cannot run a case gives a "declined" outcome."""
    for case in cases:
        for dtype in dtypes or case.dtypes:
            for verdict in selection.explain_case(op, case, dtype, properties(device)).verdicts:
                if verdict.backend == "reference" or (backends and verdict.backend not in backends):
                    continue
                task = Task(op, case, dtype, verdict.backend)
                reason = verdict.reason or interpreter_limit(verdict.backend, dtype, device)
                if reason is None:
                    yield task
                elif backends:
                    yield _outcome(task, "declined", message=reason)


def run(task: Task, device: torch.device, expected_on: torch.device | None = None) -> Outcome:
    """Runs one check, with expected results computed on the device or on `expected_on`; an exception is a failure."""
    try:
        reports = check.verify(task.op, task.case, task.dtype, task.backend, device, expected_on=expected_on)
    except Exception as error:  # the kernel under test may raise anything
        return _outcome(task, "failed", message=f"{type(error).__name__}: {error}")
    wrong = [report.message for report in reports if not report.ok]
    # An exact result has share 0, even where the limit is zero.
    share = max((report.error / report.limit if report.limit else report.error for report in reports), default=0.0)
    return _outcome(task, "failed" if wrong else "passed", share if math.isfinite(share) else None, "; ".join(wrong))


def interpreter_limit(backend: str, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why a backend cannot be checked under Triton's interpreter; None where it can."""
    if backend == "triton" and device.type == "cpu" and dtype == torch.bfloat16 and env.interpreting():
        return "Triton's interpreter computes bfloat16 wrongly; check it on a GPU"
    return None


def _outcome(task: Task, status: str, share: float | None = None, message: str = "") -> Outcome:
    dtype = str(task.dtype).removeprefix("torch.")
    return Outcome(task.op.name, task.case.name, dtype, task.backend, status, share, message)


def nothing_checked(outcomes: Sequence[Outcome]) -> str | None:
    """Why no check ran, with the reasons that backends gave; None if one ran."""
    if any(outcome.status != "declined" for outcome in outcomes):
        return None
    if not outcomes:
        return "nothing was checked: no backend supports the selected cases and dtypes on this device"
    counts = Counter((outcome.backend, outcome.message) for outcome in outcomes)
    reasons = [f"  {backend}: {message} ({number} checks)" for (backend, message), number in counts.most_common()]
    return "\n".join(["nothing was checked: every selected backend declined every case", *reasons])
