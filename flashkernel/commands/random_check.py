"""`flashkernel check --random`: random calls in worker processes, and the command that repeats each failure."""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from flashkernel.lab import screen
from flashkernel.lab.screen import Format

if TYPE_CHECKING:
    from rich.progress import Progress

    from flashkernel.lab.random_calls import Call, CallOutcome

MOST_WORKERS = 8
DEFAULT_SECONDS = 60.0


class Sizes(str, Enum):
    small = "small"
    large = "large"


RandomSeconds = Annotated[
    float | None, typer.Option("--seconds", min=1, help="With --random: start calls for so long; by default 60.")
]
RandomCalls = Annotated[int | None, typer.Option("--calls", min=1, help="With --random: so many calls at most.")]
RandomSeed = Annotated[
    int | None,
    typer.Option("--seed", min=0, help="With --random: the first seed; alone, one call of each operator with it."),
]
RandomSizes = Annotated[
    Sizes | None,
    typer.Option("--sizes", help="With --random: small suits Triton's interpreter, large a GPU, where it is default."),
]
RandomWorkers = Annotated[
    int | None, typer.Option("--workers", min=1, help="With --random: processes; by default one a core, 8 at most.")
]
RandomTimeout = Annotated[
    float, typer.Option("--timeout", min=1, help="With --random: seconds after which a call counts as hung.")
]


@dataclass(frozen=True)
class Limits:
    """How much to draw, and from where."""

    seconds: float | None
    calls: int | None
    seed: int | None
    sizes: str | None
    workers: int | None
    timeout_s: float


def check_random(
    names: Sequence[str] | None,
    backend: Sequence[str] | None,
    device: str | None,
    limits: Limits,
    format: Format,
) -> None:
    """Draw calls, check them, print what failed and how to repeat it; exit 1 if one failed."""
    with screen.clear_errors():
        from flashkernel.core import env
        from flashkernel.lab import random_calls, selection

        place = selection.device(device)
        chosen = selection.operators(names)
        backends = selection.implementations(chosen, backend, baselines=False) or []
    sizes = limits.sizes or ("large" if place.type == "cuda" else "small")
    repeat = limits.seed is not None and limits.seconds is None and limits.calls is None
    seed = secrets.randbelow(2**31) if limits.seed is None else limits.seed
    outcomes: list[CallOutcome] = []
    if place.type == "cpu" and not env.interpreting():
        screen.tell("on a CPU, Triton kernels are checked with TRITON_INTERPRET=1; without it torch alone serves")
    with screen.progress() as progress, screen.keeping_results() as stopped, _interruptible():
        if repeat:  # in this process, where a debugger sees it
            calls = [random_calls.Call(op.name, seed, sizes) for op in chosen]
            found: Iterator[CallOutcome] = (random_calls.run_one(call, place, backends) for call in calls)
        else:
            seconds = DEFAULT_SECONDS if limits.seconds is None and limits.calls is None else limits.seconds
            batches = _until(random_calls.schedule(chosen, seed, sizes, limits.calls), seconds)
            workers = limits.workers or min(MOST_WORKERS, len(os.sched_getaffinity(0)))
            found = random_calls.run(batches, place, backends, workers, limits.timeout_s)
        _collect(found, outcomes, progress, limits.calls)
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    screen.show(format, [outcome.as_dict() for outcome in outcomes], [_summary(outcomes)])
    if repeat and format is Format.table:
        for outcome in outcomes:
            screen.tell(f"{outcome.call.op}: {outcome.case}")
    for outcome in failed:
        screen.tell(_failure(outcome))
    screen.leave(stopped, failed=bool(failed))


@contextmanager
def _interruptible() -> Iterator[None]:
    """A run that is terminated (by `timeout`, say) prints what it found, as one that is interrupted does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _until(batches: Iterator[list[Call]], seconds: float | None) -> Iterator[list[Call]]:
    """The batches that there is time to start."""
    end = None if seconds is None else time.monotonic() + seconds
    for batch in batches:
        if end is not None and time.monotonic() >= end:
            return
        yield batch


def _collect(found: Iterator[CallOutcome], outcomes: list[CallOutcome], progress: Progress, total: int | None) -> None:
    bar = progress.add_task("starting", total=total)
    start = time.monotonic()
    failed = 0
    for outcome in found:
        outcomes.append(outcome)
        if outcome.status == "failed":
            failed += 1
        rate = len(outcomes) / max(1e-3, time.monotonic() - start)
        progress.update(bar, advance=1, description=f"{rate:.1f} calls/s, {failed} failed; {outcome.call.op}")


def _failure(outcome: CallOutcome) -> str:
    wrong = "\n".join(f"  {name}: {message}" for name, message in outcome.failures.items())
    return f"{outcome.call.op} {outcome.case}\n{wrong}\n  repeat: {outcome.command}"


def _summary(outcomes: Sequence[CallOutcome]) -> Table:
    """Calls counted by operator."""
    table = Table("operator", "calls", "passed", "failed", "torch alone", "checks of each backend")
    for op in dict.fromkeys(outcome.call.op for outcome in outcomes):
        mine = [outcome for outcome in outcomes if outcome.call.op == op]
        count = Counter(outcome.status for outcome in mine)
        ran = Counter(name for outcome in mine for name in outcome.checked)
        failed = f"[bold red]{count['failed']}[/]" if count["failed"] else "0"
        table.add_row(op, str(len(mine)), str(count["passed"]), failed, str(count["refused"]),
                      escape(", ".join(f"{name} {times}" for name, times in ran.items())))  # fmt: skip
    return table
