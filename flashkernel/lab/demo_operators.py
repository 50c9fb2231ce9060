"""The demo of operators: each is checked against its reference on this machine and timed against PyTorch eager."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from flashkernel.core.device import model_dtype, properties
from flashkernel.core.op import Case, Op
from flashkernel.lab import checks, selection, tables
from flashkernel.lab.bench import BenchOptions, bench
from flashkernel.lab.results import Record

CPU_BUDGET_S, GPU_BUDGET_S = 0.15, 0.5
EAGER = "eager"


@dataclass
class Summary:
    """The checks and times of one operator: a row of the table."""

    op: str
    backend: str = ""
    passed: int = 0
    failures: list[checks.Outcome] = field(default_factory=list)
    case: str = ""
    records: list[Record] = field(default_factory=list)

    def timed(self, *directions: str) -> tuple[Record | None, Record | None]:
        """(our record, PyTorch's record) of one of the directions."""
        found = {record.kind: record for record in self.records if record.direction in directions}
        return found.get("backend"), found.get("baseline")

    @property
    def failure_messages(self) -> list[str]:
        """Failures of our backends, a line each."""
        checked = [f"{one.op} {one.case} {one.dtype} {one.backend}: {one.message}" for one in self.failures]
        return checked + tables.failure_messages(record for record in self.records if record.kind == "backend")

    def as_dict(self) -> dict[str, Any]:
        failures = [outcome.as_dict() for outcome in self.failures]
        records = [record.as_dict() for record in self.records]
        return {"op": self.op, "backend": self.backend, "passed": self.passed, "failures": failures, "records": records}


@dataclass(frozen=True)
class Step:
    """One check or measurement, and what it is called on the progress bar."""

    title: str
    run: Callable[[], None]


def steps(ops: Sequence[Op], device: torch.device, quick: bool, summaries: list[Summary]) -> Iterator[Step]:
    """Yields all checks and measurements; running them fills `summaries`. `quick`: one dtype, forward times only."""
    dtype = model_dtype(properties(device))
    for op in ops:
        summary = Summary(op.name)
        summaries.append(summary)
        for task in checks.tasks(op, op.cases, None, None, device):
            if isinstance(task, checks.Task) and (not quick or task.dtype in (dtype, task.case.dtypes[0])):
                yield Step(f"checking {task}", partial(_check, task, device, summary))
        yield Step(f"timing {op.name}", partial(_time, op, representative(op, device), dtype, device, quick, summary))


def representative(op: Op, device: torch.device) -> Case:
    """The middle one of an operator's differentiable benchmark cases, small enough for the device."""
    eligible = [case for case in op.benches if case.gradients] or list(op.benches)
    chosen = eligible[len(eligible) // 2]
    return selection.scaled(op, chosen, selection.CPU_ELEMENTS) if device.type == "cpu" else chosen


def _check(task: checks.Task, device: torch.device, summary: Summary) -> None:
    outcome = checks.run(task, device)
    if outcome.status == "passed":
        summary.passed += 1
    else:
        summary.failures.append(outcome)


def _time(op: Op, case: Case, dtype: torch.dtype, device: torch.device, quick: bool, summary: Summary) -> None:
    budget = CPU_BUDGET_S if device.type == "cpu" else GPU_BUDGET_S
    summary.case = case.name
    summary.backend = selection.explain_case(op, case, dtype, properties(device)).chosen or ""
    options = BenchOptions(
        device,
        directions=("fwd",) if quick else None,
        implementations=(summary.backend, EAGER),
        budget_s=budget / (3 if quick else 1),
    )
    with _one_thread():
        summary.records = list(bench(op, case, dtype, options))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Runs torch on one thread: on a busy machine a short multi-threaded run measures waiting threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
