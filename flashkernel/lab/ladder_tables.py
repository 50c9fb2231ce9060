"""Tables of the GEMM ladder: TFLOP/s of each rung, its share of cuBLAS, and why it is faster than the one before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from flashkernel.lab.results import Record

if TYPE_CHECKING:
    from rich.table import Table

OP = "gemm_ladder"  # the records' operator name, and the file's
HEADINGS = ("rung", "name", "idea", "TFLOP/s", "of cuBLAS", "why it is faster than the one before")


def rich_table(records: Sequence[Record], device: str = "") -> Table:
    """A terminal table, a row for each rung and one for cuBLAS."""
    from rich.table import Table

    title = "the GEMM ladder, " + ", ".join(dict.fromkeys(_product(record) for record in records))
    table = Table(title=title + (f", {device}" if device else ""), title_justify="left", show_lines=True)
    for heading in HEADINGS:
        table.add_column(heading, justify="right" if heading in HEADINGS[3:5] else "left")
    for cells in _rows(records):
        table.add_row(*cells)
    return table


def markdown(records: Sequence[Record]) -> str:
    """The same table in markdown, one after the other for each product."""
    lines = ["| " + " | ".join(HEADINGS) + " |", "| --- | --- | --- | ---: | ---: | --- |"]
    lines += ["|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|" for cells in _rows(records)]
    return "\n".join(lines)


def share(record: Record, records: Iterable[Record]) -> float | None:
    """TFLOP/s of a rung divided by cuBLAS's for the same product; None without both."""
    theirs = next((one.tflops for one in records if one.kind == "baseline" and one.key == record.key), None)
    return record.tflops / theirs if record.tflops and theirs else None


def _rows(records: Sequence[Record]) -> list[list[str]]:
    from flashkernel.ops.gemm import ladder  # imports torch

    rungs = {rung.name: (str(number), rung.name, rung.idea, rung.reason) for number, rung in enumerate(ladder.RUNGS, 1)}
    several = len({record.key for record in records}) > 1
    rows = []
    for record in records:
        number, name, idea, reason = rungs.get(record.implementation, ("", record.implementation, "torch.matmul", ""))
        part = share(record, records)
        speed = f"{record.tflops:.1f}" if record.tflops else "failed" if record.error else "wrong"
        if several:
            name = f"{name}, {_product(record)}"
        rows.append([number, name, idea, speed, "" if part is None else f"{part:.1%}", reason])
    return rows


def _product(record: Record) -> str:
    return f"{' x '.join(str(size) for size in record.axes.values())} {record.dtype}"
