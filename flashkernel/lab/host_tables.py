"""Tables of the host time of calls: flashkernel against torch's own function for the same operation, in us."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from flashkernel.lab.results import Record

if TYPE_CHECKING:
    from rich.table import Table

OP = "host"  # the records' operator name, and the file's
HEADINGS = ("function", "direction", "flashkernel, us", "torch, us", "limit, us")
DIRECTIONS = "fwd: forward under no_grad, fwd-grad: forward that records a graph, bwd: backward"


def rich_table(records: Sequence[Record], device: str = "") -> Table:
    """A terminal table: host us of each function, torch's own, and the limit it should keep."""
    from rich.table import Table

    title = "host time of a call in us (median)" + (f", GPU: {device}" if device else "")
    table = Table(title=title, title_justify="left", caption=DIRECTIONS, caption_justify="left")
    for heading in (*HEADINGS, "verdict"):
        table.add_column(heading, justify="right" if heading.endswith("us") else "left")
    for ours, theirs in side_by_side(records):
        table.add_row(*_cells(ours, theirs), _verdict(ours))
    return table


def markdown(records: Sequence[Record]) -> str:
    """The same table in markdown."""
    lines = ["| " + " | ".join(HEADINGS) + " |", "| --- | --- | ---: | ---: | ---: |"]
    lines += ["| " + " | ".join(_cells(ours, theirs)) + " |" for ours, theirs in side_by_side(records)]
    return "\n".join(lines)


def side_by_side(records: Iterable[Record]) -> list[tuple[Record, Record | None]]:
    """(flashkernel's record, torch's record or None) of each function and direction."""
    grouped: dict[tuple[str, str], dict[str, Record]] = {}
    for record in records:
        grouped.setdefault((record.case, record.direction), {})[record.kind] = record
    return [(found["backend"], found.get("baseline")) for found in grouped.values() if "backend" in found]


def _cells(ours: Record, theirs: Record | None) -> list[str]:
    return [ours.case, ours.direction, _us(ours.host_us), _us(theirs.host_us if theirs else None), _us(ours.limit_us)]


def _us(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _verdict(ours: Record) -> str:
    if not ours.correct:
        return ours.note or "wrong"
    if ours.host_us is None or not ours.limit_us or ours.host_us <= ours.limit_us:
        return ""
    return f"{ours.host_us / ours.limit_us:.2f}x the limit"
