"""What the commands share on the terminal: results on standard output, progress and remarks on standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from flashkernel.lab import generation_tables, tables
from flashkernel.lab.results import AnyRecord, Generation, Record

if TYPE_CHECKING:
    from flashkernel.lab.checks import Outcome
    from flashkernel.lab.demo import Summary

INTERRUPTED = 130
FILE_WIDTH = 160  # columns where the output is no terminal


class Format(str, Enum):
    """How results are printed."""

    table = "table"
    json = "json"
    csv = "csv"


@dataclass
class Stop:
    """Why a run ended early: the exit code, or 0 where it did not."""

    code: int = 0


def out() -> Console:
    return Console(width=None if sys.stdout.isatty() else FILE_WIDTH)


def errors() -> Console:
    return Console(stderr=True, width=None if sys.stderr.isatty() else FILE_WIDTH)


def tell(text: str) -> None:
    """A remark, beside the results."""
    errors().print(text, markup=False, highlight=False, soft_wrap=True)


def show(format: Format, values: Sequence[Mapping[str, Any]], shown: Iterable[Table]) -> None:
    """Print results in the format asked for: `values` as JSON or CSV, or the tables made of them."""
    if format is Format.json:
        sys.stdout.write(tables.as_json(values) + "\n")
    elif format is Format.csv:
        sys.stdout.write(tables.as_csv(values))
    else:
        for table in shown:
            out().print(table)


def show_records(format: Format, records: Sequence[AnyRecord]) -> None:
    """Print measurements, a table for each operator and one for whole models, with what went wrong below."""
    measured = [record for record in records if isinstance(record, Record)]
    generated = [record for record in records if isinstance(record, Generation)]
    names = dict.fromkeys(record.op for record in measured)
    grouped = {name: [record for record in measured if record.op == name] for name in names}
    shown = [tables.rich_table(name, found) for name, found in grouped.items()]
    if generated:
        shown.append(generation_tables.rich_table(generated))
    show(format, [record.as_dict() for record in records], shown)
    if format is Format.table:
        for remark in (*tables.remarks(measured), *generation_tables.remarks(generated)):
            tell(remark)


def host_table(records: Sequence[Record]) -> Table:
    """Host microseconds of each function beside torch's own, and the limit it should keep."""
    table = Table(
        "function", "direction", "ours, us", "torch, us", "limit, us", "", title="host time of a call",
        title_justify="left",
    )  # fmt: skip
    rows: dict[tuple[str, str], dict[str, Record]] = {}
    for record in records:
        rows.setdefault((record.case, record.direction), {})[record.kind] = record
    for (case, direction), found in rows.items():
        ours, own = found["backend"], found.get("baseline")
        mine, limit = ours.host_us or 0.0, ours.limit_us or 0.0
        verdict = ours.note or "" if not ours.correct else "" if mine <= limit else f"{mine / limit:.2f}x the limit"
        beside = "" if own is None or own.host_us is None else f"{own.host_us:.1f}"
        table.add_row(case, direction, f"{mine:.1f}", beside, f"{limit:.1f}", verdict)
    return table


@contextmanager
def progress() -> Iterator[Progress]:
    """A progress bar; nothing where standard error is no terminal."""
    console = errors()
    bar = Progress(
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        yield bar


@contextmanager
def keeping_results() -> Iterator[Stop]:
    """Let Ctrl-C, or the loss of the GPU, end a run but not what comes after it: printing what was measured."""
    from flashkernel.lab.bench import DeviceLostError

    stop = Stop()
    try:
        yield stop
    except KeyboardInterrupt:
        stop.code = INTERRUPTED
        tell("stopped; here is what was measured until then")
    except DeviceLostError as error:
        stop.code = 1
        tell(f"{error}; here is what was measured until then; run again without the implementation that failed last")


@contextmanager
def clear_errors() -> Iterator[None]:
    """Turn wrong names, values and files into a message and exit code 2, without a traceback."""
    try:
        yield
    except (ValueError, OSError) as error:
        tell(str(error))
        raise typer.Exit(2) from None


def leave(stop: Stop, failed: bool) -> None:
    """End the command with the exit code it has earned."""
    code = stop.code or int(failed)
    if code:
        raise typer.Exit(code)


def check_summary(outcomes: Sequence[Outcome]) -> Table:
    """Checks counted by operator and backend."""
    table = Table("operator", "backend", "passed", "failed", "declined", "largest error / limit")
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.op, outcome.backend), []).append(outcome)
    for (op, backend), group in groups.items():
        counts = [sum(outcome.status == status for outcome in group) for status in ("passed", "failed", "declined")]
        shares = [outcome.share for outcome in group if outcome.share is not None]
        failed = f"[bold red]{counts[1]}[/]" if counts[1] else "0"
        table.add_row(op, backend, str(counts[0]), failed, str(counts[2]), f"{max(shares):.2f}" if shares else "")
    return table


def demo_table(summaries: Sequence[Summary]) -> Table:
    """Each operator: whether it is right here, and its speed beside plain PyTorch's."""
    table = Table(
        "operator", "backend", "checks", "timed on", caption="times are of the fastest call, on a CPU with one thread"
    )
    for heading in ("forward ms", "PyTorch ms", "speed-up", "backward ms", "PyTorch ms", "speed-up"):
        table.add_column(heading, justify="right")
    for summary in summaries:
        total = summary.passed + len(summary.failures)
        checks = f"[bold red]{summary.passed}/{total}[/]" if summary.failures else f"[green]{summary.passed}/{total}[/]"
        speeds = (*_speed_cells(summary, "fwd"), *_speed_cells(summary, "bwd", "fwd+bwd"))
        table.add_row(summary.op, summary.backend, checks, escape(summary.case), *speeds)
    return table


def _speed_cells(summary: Summary, *directions: str) -> tuple[str, str, str]:
    """Ours, PyTorch's and the speed-up, by the fastest call: the others of a short run tell how busy the machine is."""
    ours, plain = summary.timed(*directions)
    step = " (step)" if ours is not None and ours.direction == "fwd+bwd" else ""
    ratio = ""
    if ours is not None and plain is not None and ours.counts and plain.counts and ours.ms and plain.ms:
        ratio = f"{plain.ms['min'] / ours.ms['min']:.2f}x"
    return tables.rich_cell(ours, statistic="min") + step, tables.rich_cell(plain, statistic="min"), ratio
