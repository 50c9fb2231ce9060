"""Tables of the host time of calls in us: flashkernel against torch's own function, and CUDA C++ against Triton."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from flashkernel.lab.results import Record

if TYPE_CHECKING:
    from rich.table import Table

OP = "host"  # the records' operator name, and the file's
HEADINGS = ("function", "direction", "flashkernel, us", "torch, us", "limit, us")
CUDA, TRITON = "cuda", "triton"  # implementations of the records of lab/launch_cost.py
NO_REPLAY = "fwd-no-replay"
LAUNCH_HEADINGS = ("function", "replayed: CUDA C++, us", "Triton, us", "not replayed: CUDA C++, us", "Triton, us")
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


def launch_rows(records: Iterable[Record]) -> list[list[str]]:
    """The cells of `LAUNCH_HEADINGS` for each function that was called by CUDA C++ and by Triton."""
    found = {(one.case, one.direction, one.implementation): _us(one.host_us) for one in records}
    cases = dict.fromkeys(case for case, _, name in found if name == CUDA)
    return [
        [case.removeprefix("launch-"), *(found.get((case, direction, name), "")
         for direction in ("fwd", NO_REPLAY) for name in (CUDA, TRITON))]
        for case in cases
    ]  # fmt: skip


def launch_table(records: Sequence[Record], device: str = "") -> Table:
    """A terminal table: host us of calls by CUDA C++ and by Triton."""
    from rich.table import Table

    title = "host time of a call by CUDA C++ and by Triton in us (median)" + (f", GPU: {device}" if device else "")
    table = Table(title=title, title_justify="left")
    for heading in LAUNCH_HEADINGS:
        table.add_column(heading, justify="right" if heading.endswith("us") else "left")
    for cells in launch_rows(records):
        table.add_row(*cells)
    return table


def launch_markdown(records: Sequence[Record]) -> str | None:
    """The same table in markdown; None without figures."""
    rows = launch_rows(records)
    lines = ["| " + " | ".join(LAUNCH_HEADINGS) + " |", "| --- | ---: | ---: | ---: | ---: |"]
    return "\n".join([*lines, *("| " + " | ".join(cells) + " |" for cells in rows)]) if rows else None


def side_by_side(records: Iterable[Record]) -> list[tuple[Record, Record | None]]:
    """(flashkernel's record, torch's record or None) of each function and direction."""
    grouped: dict[tuple[str, str], dict[str, Record]] = {}
    for record in records:
        if record.implementation not in (CUDA, TRITON):
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
