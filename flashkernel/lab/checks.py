"""The declared test cases run as a command: every operator, case, dtype and backend that serves it, here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from flashkernel.core import check, env
from flashkernel.core.device import facts
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
    """What a check found: "passed", "failed", or "declined" by a backend that was asked for."""

    op: str
    case: str
    dtype: str
    backend: str
    status: str
    share: float | None = None  # largest error as a share of what is allowed
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
    """What there is to check; a backend that was asked for by name and cannot serve comes as its outcome."""
    for case in cases:
        for dtype in dtypes or case.dtypes:
            for verdict in selection.question(op, case, dtype, facts(device)).verdicts:
                if verdict.backend == "reference" or (backends and verdict.backend not in backends):
                    continue
                task = Task(op, case, dtype, verdict.backend)
                reason = verdict.reason or interpreter_limit(verdict.backend, dtype, device)
                if reason is None:
                    yield task
                elif backends:
                    yield _outcome(task, "declined", message=reason)


def run(task: Task, device: torch.device) -> Outcome:
    """Run one check; what it raises is a failure of that check."""
    try:
        reports = check.verify(task.op, task.case, task.dtype, task.backend, device)
    except Exception as error:  # the kernel under test may raise anything
        return _outcome(task, "failed", message=f"{type(error).__name__}: {error}")
    wrong = [report.message for report in reports if not report.ok]
    # An exact result is no share of its limit, even where the limit is zero.
    share = max((report.error / report.limit if report.limit else report.error for report in reports), default=0.0)
    return _outcome(task, "failed" if wrong else "passed", share if math.isfinite(share) else None, "; ".join(wrong))


def interpreter_limit(backend: str, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why a backend that serves a call is not checked here; None where it is."""
    if backend == "triton" and device.type == "cpu" and dtype == torch.bfloat16 and env.interpreting():
        return "Triton's interpreter computes bfloat16 wrongly; check it on a GPU"
    return None


def _outcome(task: Task, status: str, share: float | None = None, message: str = "") -> Outcome:
    dtype = str(task.dtype).removeprefix("torch.")
    return Outcome(task.op.name, task.case.name, dtype, task.backend, status, share, message)
