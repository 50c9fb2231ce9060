"""Records of whole models as tables: a row for each model, batch and quantity, a column for each contender."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashkernel.lab.results import Generation

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Quantity:
    """Something measured: what it is called, its value, how it is written, and whether more of it is better."""

    name: str
    value: Callable[[Generation], float | None]
    text: Callable[[Generation], str]
    more: bool = False


def _speed(record: Generation) -> str:
    share = "" if record.floor is None else f" ({record.floor:.0%})"
    return "" if record.tokens_per_s is None else _number(record.tokens_per_s) + share


SPEEDS = (
    Quantity("decode, tokens/s", lambda record: record.tokens_per_s, _speed, more=True),
    Quantity("first token, ms", lambda record: record.ttft_ms, lambda record: _number(record.ttft_ms)),
)
STEP = Quantity("ms/token", lambda record: record.ms_per_token, lambda record: _number(record.ms_per_token))
COSTS = (
    Quantity(
        "peak memory, GB",
        lambda record: record.peak_bytes,
        lambda record: _number(None if record.peak_bytes is None else record.peak_bytes / 1e9),
    ),
    Quantity("J/token", lambda record: record.joules_per_token, lambda record: _number(record.joules_per_token)),
)


def columns(records: Iterable[Generation]) -> list[str]:
    """The contenders, ours first, the engine before what else is ours."""
    ordered = sorted(records, key=lambda record: (record.kind != "backend", record.implementation != "engine"))
    return list(dict.fromkeys(record.implementation for record in ordered))


def rich_table(records: Sequence[Generation]) -> Table:
    """A terminal table of all quantities that were measured."""
    from rich.table import Table

    names = columns(records)
    first = records[0]
    title = f"e2e, prompts of {first.prompt} tokens, {first.new} new ones"
    table = Table("model", "batch", "dtype", "", title=title, title_justify="left")
    for name in (*names, "vs best peer"):
        table.add_column(name, justify="right")
    for cells, mine, best in _rows(records, names, (SPEEDS[0], STEP, *SPEEDS[1:], *COSTS)):
        shown = [
            f"[red]{text}[/red]"
            if name in mine and not mine[name].counts
            else f"[bold]{text}[/bold]"
            if name == best
            else text
            for name, text in zip(names, cells[4:])
        ]
        table.add_row(*cells[:4], *shown, cells[-1])
    return table


def markdown(records: Sequence[Generation], quantities: Sequence[Quantity] = SPEEDS) -> str:
    """A markdown table of some quantities, the best of each row in bold."""
    names = columns(records)
    headings = ["model", "batch", "dtype", "", *names, "vs best peer"]
    lines = [
        "| " + " | ".join(headings) + " |",
        "| " + " | ".join(["---"] * 4 + ["---:"] * (len(names) + 1)) + " |",
    ]
    for cells, _, best in _rows(records, names, quantities):
        shown = [f"**{text}**" if name == best else text for name, text in zip(names, cells[4:])]
        lines.append("| " + " | ".join([*cells[:4], *shown, cells[-1]]) + " |")
    return "\n".join(lines)


def line(record: Generation) -> str:
    """One measurement in a line, for a log."""
    head = f"e2e {record.case} {record.dtype} {record.implementation}: "
    if record.error:
        return head + record.error
    parts = [f"{quantity.name} {quantity.text(record)}" for quantity in (*SPEEDS, *COSTS) if quantity.text(record)]
    return head + ", ".join(parts) + ("" if record.correct else f"; wrong: {record.note}")


def remarks(records: Iterable[Generation]) -> list[str]:
    """What a table cannot hold: why a contender is absent or was wrong."""
    return [
        f"e2e {record.case} {record.implementation}: " + (record.error or f"wrong: {record.note}")
        for record in records
        if not record.counts
    ]


def _rows(
    records: Sequence[Generation], names: Sequence[str], quantities: Sequence[Quantity]
) -> Iterable[tuple[list[str], Mapping[str, Generation], str | None]]:
    """(cells, records by contender, who is best) of each row that has anything to show."""
    grouped: dict[tuple[str, int, str, int, int], dict[str, Generation]] = {}
    for record in records:
        key = (record.model, record.batch, record.dtype, record.prompt, record.new)
        grouped.setdefault(key, {})[record.implementation] = record
    for key, mine in grouped.items():
        for quantity in quantities:
            texts = [_cell(mine.get(name), quantity) for name in names]
            if any(texts):
                head = [key[0], str(key[1]), key[2], quantity.name]
                yield [*head, *texts, _ratio(mine, names, quantity)], mine, _best(mine.values(), quantity)


def _cell(record: Generation | None, quantity: Quantity) -> str:
    if record is None:
        return ""
    if record.error:
        return "failed" if quantity is SPEEDS[0] else ""
    text = quantity.text(record)
    return text if record.correct or not text else f"{text} wrong"


def _values(records: Iterable[Generation], quantity: Quantity) -> dict[str, float]:
    found = {record.implementation: quantity.value(record) for record in records if record.counts}
    return {name: value for name, value in found.items() if value}


def _best(records: Iterable[Generation], quantity: Quantity) -> str | None:
    values = _values(records, quantity)
    if len(values) < 2:
        return None
    return (max if quantity.more else min)(values, key=lambda name: values[name])


def _ratio(mine: Mapping[str, Generation], names: Sequence[str], quantity: Quantity) -> str:
    """How many times better than the best baseline the first of ours is."""
    ours = next((mine[name] for name in names if name in mine and mine[name].kind == "backend"), None)
    peers = _values((record for record in mine.values() if record.kind == "baseline"), quantity)
    value = None if ours is None or not ours.counts else quantity.value(ours)
    if not value or not peers:
        return ""
    ratio = value / max(peers.values()) if quantity.more else min(peers.values()) / value
    return f"{ratio:.2f}x"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.3g}"
