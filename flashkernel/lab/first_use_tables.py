"""Tables of the first use of CUDA C++ kernels: seconds to compile, milliseconds from the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flashkernel.lab.results import Record

if TYPE_CHECKING:
    from rich.table import Table

OP = "first_use"  # the records' operator name, and the file's
COMPILED, CACHED = "compile", "cached"  # the records' directions
COMPILE_LIMIT_S, CACHED_LIMIT_MS = 10.0, 50.0
HEADINGS = ("kernel", "operators", "compile, s", "from the cache, ms")


def rows(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """The cells of each kernel."""
    grouped: dict[str, dict[str, Record]] = {}
    for record in records:
        grouped.setdefault(record.case, {})[record.direction] = record
    return [
        (
            f"`{case}`",
            str(found[COMPILED].axes["operators"]),
            *(_cell(found[name], name) for name in (COMPILED, CACHED)),
        )
        for case, found in grouped.items()
        if set(found) == {COMPILED, CACHED}
    ]


def late(records: Sequence[Record]) -> list[str]:
    """Kernels that take longer than they should."""
    limits = {COMPILED: COMPILE_LIMIT_S * 1e3, CACHED: CACHED_LIMIT_MS}
    return [
        f"{one.case}: {one.direction} takes {one.p50:.0f} ms, above {limits[one.direction]:.0f} ms"
        for one in records
        if one.p50 is not None and one.p50 > limits[one.direction]
    ]


def rich_table(records: Sequence[Record], device: str) -> Table:
    """A terminal table."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=f"first use of CUDA C++ kernels, compiled for {device}", title_justify="left")
    for heading in HEADINGS:
        table.add_column(heading, justify="right" if "," in heading else "left")
    for cells in rows(records):
        table.add_row(*(escape(cell.strip("`")) for cell in cells))
    return table


def markdown(records: Sequence[Record]) -> str:
    """The same table in markdown, with the longest times in its last row."""
    lines = ["| " + " | ".join(HEADINGS) + " |", "| --- | --- | ---: | ---: |"]
    lines += ["| " + " | ".join(cells) + " |" for cells in rows(records)]
    longest = [_cell(max((one for one in records if one.direction == name), key=lambda one: one.p50 or 0.0), name)
               for name in (COMPILED, CACHED)]  # fmt: skip
    return "\n".join([*lines, f"| longest | | {longest[0]} | {longest[1]} |"])


def _cell(record: Record, direction: str) -> str:
    value = record.p50 or 0.0
    return f"{value / 1e3:.2f}" if direction == COMPILED else f"{value:.1f}"
