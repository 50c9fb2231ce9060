"""`flashkernel check --random`: random calls in worker processes, and the command that repeats each failure."""

from __future__ import annotations

import os
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from flashkernel.lab import output, progress
from flashkernel.lab.output import Format

if TYPE_CHECKING:
    from flashkernel.lab.random_calls import Call, CallOutcome

MAX_WORKERS = 8
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
RandomRepeats = Annotated[
    int,
    typer.Option(
        "--repeats",
        min=1,
        help="With --random: make each call so often, with other values; from the third on it is replayed.",
    ),
]
RandomTimeout = Annotated[
    float, typer.Option("--timeout", min=1, help="With --random: seconds after which a call counts as hung.")
]


@dataclass(frozen=True)
class Limits:
    """How many calls to draw, and from which seeds and sizes."""

    seconds: float | None
    calls: int | None
    seed: int | None
    sizes: str | None
    workers: int | None
    timeout_s: float
    repeats: int = 1


def check_random(
    names: Sequence[str] | None,
    backend: Sequence[str] | None,
    device: str | None,
    limits: Limits,
    format: Format,
) -> None:
    """Draws calls, checks them, prints failures and how to repeat them; exits 1 if one failed or none was checked."""
    with progress.report_errors():
        from flashkernel.core import env
        from flashkernel.lab import random_calls, selection

        target = selection.device(device)
        chosen = selection.operators(names)
        backends = selection.implementations(chosen, backend, baselines=False) or []
    sizes = limits.sizes or ("large" if target.type == "cuda" else "small")
    repeat = limits.seed is not None and limits.seconds is None and limits.calls is None
    seed = secrets.randbelow(2**31) if limits.seed is None else limits.seed
    outcomes: list[CallOutcome] = []
    if target.type == "cpu" and not env.interpreting():
        progress.log("on a CPU Triton kernels run under TRITON_INTERPRET=1 only; without it torch is the only backend")
    with progress.progress_bar(limits.calls, "starting") as bar, progress.keep_results() as stopped:
        if repeat:  # in this process, where a debugger sees it
            calls = [random_calls.Call(op.name, seed, sizes, limits.repeats) for op in chosen]
            found: Iterator[CallOutcome] = (random_calls.run_one(call, target, backends) for call in calls)
        else:
            seconds = DEFAULT_SECONDS if limits.seconds is None and limits.calls is None else limits.seconds
            batches = _until(random_calls.schedule(chosen, seed, sizes, limits.calls, limits.repeats), seconds)
            workers = limits.workers or min(MAX_WORKERS, len(os.sched_getaffinity(0)))
            found = random_calls.run(batches, target, backends, workers, limits.timeout_s)
        _collect(found, outcomes, bar)
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    output.show(format, [outcome.as_dict() for outcome in outcomes], [_summary(outcomes)])
    if repeat and format is Format.table:
        for outcome in outcomes:
            progress.log(f"{outcome.call.op}: {outcome.case}")
    for outcome in failed:
        progress.log(_failure(outcome))
    nothing = not stopped.code and not failed and not any(outcome.checked for outcome in outcomes)
    if nothing:
        named = f"the selected backends ({', '.join(backends)})" if backends else "no backend"
        verb = "support none of the calls" if backends else "supports the calls"
        progress.log(f"nothing was checked: {named} {verb} on this device; flashkernel ops --why says why")
    progress.exit_with(stopped, failed=bool(failed) or nothing)


def _until(batches: Iterator[list[Call]], seconds: float | None) -> Iterator[list[Call]]:
    """Yields batches until the time is up."""
    end = None if seconds is None else time.monotonic() + seconds
    for batch in batches:
        if end is not None and time.monotonic() >= end:
            return
        yield batch


def _collect(found: Iterator[CallOutcome], outcomes: list[CallOutcome], bar: progress.Bar) -> None:
    start = time.monotonic()
    failed = 0
    for outcome in found:
        outcomes.append(outcome)
        if outcome.status == "failed":
            failed += 1
        rate = len(outcomes) / max(1e-3, time.monotonic() - start)
        bar.next(f"{rate:.1f} calls/s, {failed} failed; {outcome.call.op}")


def _failure(outcome: CallOutcome) -> str:
    wrong = "\n".join(f"  {name}: {message}" for name, message in outcome.failures.items())
    return f"{outcome.call.op} {outcome.case}\n{wrong}\n  repeat: {outcome.command}"


def _summary(outcomes: Sequence[CallOutcome]) -> Table:
    """A table that counts calls by operator."""
    table = Table("operator", "calls", "passed", "failed", "no kernel", "checks by backend")
    for op in dict.fromkeys(outcome.call.op for outcome in outcomes):
        mine = [outcome for outcome in outcomes if outcome.call.op == op]
        count = Counter(outcome.status for outcome in mine)
        ran = Counter(name for outcome in mine for name in outcome.checked)
        failed = f"[bold red]{count['failed']}[/]" if count["failed"] else "0"
        table.add_row(op, str(len(mine)), str(count["passed"]), failed, str(count["refused"]),
                      escape(", ".join(f"{name} {times}" for name, times in ran.items())))  # fmt: skip
    return table
