"""Results on standard output: rich tables, JSON or CSV. Messages and progress go to standard error (`progress`)."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flashkernel.lab import first_use_tables, generation_tables, host_tables, ladder_tables, serve_records, tables
from flashkernel.lab.progress import FILE_WIDTH, log
from flashkernel.lab.results import GenerationRecord, Record, SavedRecord
from flashkernel.lab.serve_records import ServeRecord

if TYPE_CHECKING:
    from flashkernel.core.roofline import Ceilings
    from flashkernel.lab.checks import Outcome
    from flashkernel.lab.demo_operators import Summary


TRAINING_STEP = "training_step"  # its memory is shown too


class Format(str, Enum):
    """How results are printed."""

    table = "table"
    json = "json"
    csv = "csv"


def stdout_console() -> Console:
    return Console(width=None if sys.stdout.isatty() else FILE_WIDTH)


def show(format: Format, values: Sequence[Mapping[str, Any]], shown: Iterable[Table]) -> None:
    """Prints `values` as JSON or CSV, or the tables made of them."""
    if format is Format.json:
        sys.stdout.write(tables.as_json(values) + "\n")
    elif format is Format.csv:
        sys.stdout.write(tables.as_csv(values))
    else:
        for table in shown:
            stdout_console().print(table)


def show_records(
    format: Format, records: Sequence[SavedRecord], device: str = "", ceilings: Ceilings | None = None
) -> None:
    """Prints measurements: a table for each operator, one for whole models and one for loads of requests, then the
    reasons of failures.

    Args:
        format: a table, JSON or CSV.
        records: what was measured.
        device: name of the device, for the tables' titles.
        ceilings: its measured bandwidth and FLOP rates, for the tables' roofs.
    """
    measured = [record for record in records if isinstance(record, Record)]
    generated = [record for record in records if isinstance(record, GenerationRecord)]
    served = [record for record in records if isinstance(record, ServeRecord)]
    shown: list[Table] = []
    for op in dict.fromkeys(record.op for record in measured):
        of_op = [record for record in measured if record.op == op]
        if op == host_tables.OP:
            shown += host_rich_tables(of_op, device)
            continue
        if op == first_use_tables.OP:
            shown.append(first_use_tables.rich_table(of_op, device))
            continue
        if op == ladder_tables.OP:
            shown.append(ladder_tables.rich_table(of_op, device))
            continue
        shown.append(tables.rich_table(op, of_op, device, ceilings))
        if op == TRAINING_STEP and any(record.peak_bytes for record in of_op):
            shown.append(tables.rich_table(op, of_op, device, ceilings, tables.MEMORY))
    if generated:
        shown.append(generation_tables.rich_table(generated, device, ceilings))
    if served:
        title = f"loads of requests on {device}, times are p50 / p90 / p99"
        shown.append(tables.rich_from_markdown(serve_records.table(served), title))
    show(format, [record.as_dict() for record in records], shown)
    if format is Format.table:
        for message in (*tables.failure_messages(measured), *generation_tables.failure_messages(generated)):
            log(message)


def host_rich_tables(records: Sequence[Record], device: str) -> list[Table]:
    """A table against torch, and one of CUDA C++ against Triton where it was measured."""
    launches = [host_tables.launch_table(records, device)] if host_tables.launch_rows(records) else []
    return [host_tables.rich_table(records, device), *launches]


def check_summary(outcomes: Sequence[Outcome]) -> Table:
    """A table that counts checks by operator and backend."""
    table = Table("operator", "backend", "passed", "failed", "declined", "largest error / allowed error")
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
    """A table of each operator: checks passed, and its time against PyTorch eager."""
    table = Table(
        "operator", "backend", "checks passed", "timed case",
        caption="Times are of the fastest call; a CPU runs one thread. step: forward and backward together.",
        caption_justify="left",
    )  # fmt: skip
    for heading in ("forward, ms", "PyTorch, ms", "speedup", "backward, ms", "PyTorch, ms", "speedup"):
        table.add_column(heading, justify="right")
    for summary in summaries:
        total = summary.passed + len(summary.failures)
        checks = f"[bold red]{summary.passed}/{total}[/]" if summary.failures else f"[green]{summary.passed}/{total}[/]"
        speeds = (*_speed_cells(summary, "fwd"), *_speed_cells(summary, "bwd", "fwd+bwd"))
        table.add_row(summary.op, summary.backend, checks, escape(summary.case), *speeds)
    return table


def _speed_cells(summary: Summary, *directions: str) -> tuple[str, str, str]:
    """Our time, PyTorch's time and the speedup, of the fastest calls: the median of a short run is noisy."""
    ours, plain = summary.timed(*directions)
    step = " (step)" if ours is not None and ours.direction == "fwd+bwd" else ""
    ratio = ""
    if ours is not None and plain is not None and ours.comparable and plain.comparable and ours.ms and plain.ms:
        ratio = f"{plain.ms['min'] / ours.ms['min']:.2f}x"
    return tables.rich_cell(ours, statistic="min") + step, tables.rich_cell(plain, statistic="min"), ratio
