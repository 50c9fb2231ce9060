"""`flashkernel check`: the declared test cases of operators, or random calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from flashkernel.commands.options import Cases, Dtypes, Formatted, Names, OnDevice
from flashkernel.commands.random_check import (
    Limits,
    RandomCalls,
    RandomRepeats,
    RandomSeconds,
    RandomSeed,
    RandomSizes,
    RandomTimeout,
    RandomWorkers,
    check_random,
)
from flashkernel.lab import output, progress
from flashkernel.lab.output import Format

if TYPE_CHECKING:
    from flashkernel.lab.checks import Outcome


def check(
    names: Names = None,
    backend: Annotated[list[str] | None, typer.Option(help="Check this backend; repeatable.")] = None,
    dtype: Dtypes = None,
    device: OnDevice = None,
    case: Cases = None,
    expected_on: Annotated[
        str | None,
        typer.Option(help="Where expected results are computed: cpu, so that the GPU runs the checked kernels alone."),
    ] = None,
    random: Annotated[bool, typer.Option("--random", help="Check random calls, drawn from the declarations.")] = False,
    seconds: RandomSeconds = None,
    calls: RandomCalls = None,
    seed: RandomSeed = None,
    sizes: RandomSizes = None,
    workers: RandomWorkers = None,
    repeats: RandomRepeats = 1,
    timeout: RandomTimeout = 120.0,
    format: Formatted = Format.table,
) -> None:
    """Check operators against their references on this machine; exit 1 if a check fails or none can run.

    Random calls run in worker processes; each failure is printed with the command that repeats it.
    """
    if random or repeats > 1 or any(value is not None for value in (seconds, calls, seed, sizes, workers)):
        if not random or case or dtype or expected_on:
            progress.log(
                "--random draws cases and dtypes itself; leave --case, --dtype and --expected-on out"
                if random
                else "--seconds, --calls, --seed, --sizes, --workers and --repeats belong to --random"
            )
            raise typer.Exit(2)
        limits = Limits(seconds, calls, seed, sizes.value if sizes else None, workers, timeout, repeats)
        return check_random(names, backend, device, limits, format)
    from flashkernel.lab import checks

    with progress.report_errors():
        from flashkernel.lab import selection

        target = selection.device(device)
        expected_at = None if expected_on is None else selection.device(expected_on)
        chosen = selection.operators(names)
        backends = selection.implementations(chosen, backend, baselines=False)
        dtypes = selection.dtypes(dtype)
        cases = selection.cases(chosen, case, lambda op: op.cases)
    outcomes: list[checks.Outcome] = []
    with progress.progress_bar() as bar, progress.keep_results() as stopped:
        tasks = [task for op in chosen for task in checks.tasks(op, cases[op.name], dtypes, backends, target)]
        bar.set_completed(0, len(tasks))
        for task in tasks:
            bar.describe(str(task) if isinstance(task, checks.Task) else "")
            outcomes.append(checks.run(task, target, expected_at) if isinstance(task, checks.Task) else task)
            bar.advance()
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    tables = [output.check_summary(outcomes), *([_failures(failed)] if failed else [])]
    output.show(format, [outcome.as_dict() for outcome in outcomes], tables)
    reason = None if stopped.code else checks.nothing_checked(outcomes)
    if reason is not None:
        progress.log(reason)
    progress.exit_with(stopped, failed=bool(failed) or reason is not None)


def _failures(failed: Sequence[Outcome]) -> Table:
    table = Table("operator", "case", "dtype", "backend", "error", title="failures", title_justify="left")
    for outcome in failed:
        message = f"[red]{escape(outcome.message)}[/]"
        table.add_row(outcome.op, escape(outcome.case), outcome.dtype, outcome.backend, message)
    return table
