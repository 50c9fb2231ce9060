"""Tables of generation with whole models: a row for each model, batch and quantity, a column for each runner."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashkernel.lab.engine_options import options_of
from flashkernel.lab.results import GenerationRecord

if TYPE_CHECKING:
    from rich.table import Table

    from flashkernel.core.roofline import Ceilings

RATIO = "vs best baseline"
# what the percentage beside tokens/s means
IN_BRACKETS = "in brackets % of the tokens/s at which reading the weights and the KV cache takes all the time"


@dataclass(frozen=True)
class Quantity:
    """A measured quantity: its name with its unit, its value, its text, and whether more of it is better."""

    name: str
    value: Callable[[GenerationRecord], float | None]
    text: Callable[[GenerationRecord], str]
    more: bool = False


def _speed(record: GenerationRecord) -> str:
    share = "" if record.floor is None else f" ({record.floor:.0%})"
    return "" if record.tokens_per_s is None else number(record.tokens_per_s) + share


SPEEDS = (
    Quantity("decode, tokens/s", lambda record: record.tokens_per_s, _speed, more=True),
    Quantity("first token, ms", lambda record: record.ttft_ms, lambda record: number(record.ttft_ms)),
    Quantity(
        "drafts accepted",
        lambda record: record.accepted,
        lambda record: "" if record.accepted is None else f"{record.accepted:.0%}",
        more=True,
    ),
)
STEP = Quantity("ms/token", lambda record: record.ms_per_token, lambda record: number(record.ms_per_token))
COSTS = (
    Quantity(
        "peak memory, GB",
        lambda record: record.peak_bytes,
        lambda record: number(None if record.peak_bytes is None else record.peak_bytes / 1e9),
    ),
    Quantity("J/token", lambda record: record.joules_per_token, lambda record: number(record.joules_per_token)),
)


def columns(records: Iterable[GenerationRecord]) -> list[str]:
    """The runners' names with their options: the engine, then our other runners, then the baselines."""
    ordered = sorted(
        records,
        key=lambda record: (record.kind != "backend", record.implementation != "engine", options_of(record).label),
    )
    return list(dict.fromkeys(record.runner for record in ordered))


def rich_table(records: Sequence[GenerationRecord], device: str = "", ceilings: Ceilings | None = None) -> Table:
    """A terminal table of all quantities that were measured, each with its unit."""
    from rich.table import Table

    names = columns(records)
    first = records[0]
    where = f" on {device}" if device else ""
    title = f"generation{where}: {lengths(first)} tokens"
    bandwidth = f" (copy bandwidth {ceilings.copy_tbs * 1e3:.3g} GB/s)" if ceilings else ""
    table = Table(
        "model", "batch", "dtype", "quantity", title=title, title_justify="left",
        caption=f"decode: {IN_BRACKETS}{bandwidth}", caption_justify="left",
    )  # fmt: skip
    for name in (*names, RATIO):
        table.add_column(name, justify="right")
    for cells, mine, best in _rows(records, names, (SPEEDS[0], STEP, *SPEEDS[1:], *COSTS)):
        shown = [
            f"[red]{text}[/red]"
            if name in mine and mine[name].failed
            else f"[bold]{text}[/bold]"
            if name == best
            else text
            for name, text in zip(names, cells[4:])
        ]
        table.add_row(*cells[:4], *shown, cells[-1])
    return table


def markdown(records: Sequence[GenerationRecord], quantities: Sequence[Quantity] = SPEEDS) -> str:
    """A markdown table of some quantities, the best of each row in bold."""
    names = columns(records)
    headings = ["model", "batch", "dtype", "", *names, RATIO]
    lines = [
        "| " + " | ".join(headings) + " |",
        "| " + " | ".join(["---"] * 4 + ["---:"] * (len(names) + 1)) + " |",
    ]
    for cells, _, best in _rows(records, names, quantities):
        shown = [f"**{text}**" if name == best else text for name, text in zip(names, cells[4:])]
        lines.append("| " + " | ".join([*cells[:4], *shown, cells[-1]]) + " |")
    return "\n".join(lines)


def lengths(record: GenerationRecord) -> str:
    """What a record generated: "prompts of 512 tokens, 128 new"."""
    repeats = "" if record.period is None else f" that repeat every {record.period}"
    return f"prompts of {record.prompt} tokens{repeats}, {record.new} new"


def line(record: GenerationRecord) -> str:
    """One record in a line of a log."""
    head = f"e2e {record.case} {record.dtype} {record.runner}: "
    if record.error:
        return head + record.error
    parts = [f"{quantity.name} {quantity.text(record)}" for quantity in (*SPEEDS, *COSTS) if quantity.text(record)]
    return head + ", ".join(parts) + (f"; {_why_not_comparable(record)}" if not record.correct else "")


def failure_messages(records: Iterable[GenerationRecord]) -> list[str]:
    """Why runners could not run, were wrong or were not checked, a line each."""
    return [
        f"e2e {record.case} {record.runner}: " + (record.error or _why_not_comparable(record))
        for record in records
        if not record.comparable
    ]


def _why_not_comparable(record: GenerationRecord) -> str:
    return f"not checked: {record.note}" if record.correct is None else f"wrong: {record.note}"


def _rows(
    records: Sequence[GenerationRecord], names: Sequence[str], quantities: Sequence[Quantity]
) -> Iterable[tuple[list[str], Mapping[str, GenerationRecord], str | None]]:
    """(cells, records by runner, name of the best runner) of each row that is not empty."""
    grouped: dict[tuple[str, int, str, int, int, int | None], dict[str, GenerationRecord]] = {}
    models = list(dict.fromkeys(record.model for record in records))
    for record in sorted(records, key=lambda record: (models.index(record.model), record.batch)):
        key = (record.model, record.batch, record.dtype, record.prompt, record.new, record.period)
        grouped.setdefault(key, {})[record.runner] = record
    for key, mine in grouped.items():
        for quantity in quantities:
            texts = [_cell(mine.get(name), quantity) for name in names]
            if any(texts):
                repeats = "" if key[5] is None else f", repeats every {key[5]}"
                head = [key[0] + repeats, str(key[1]), key[2], quantity.name]
                yield [*head, *texts, _ratio(mine, names, quantity)], mine, _best(mine.values(), quantity)


def _cell(record: GenerationRecord | None, quantity: Quantity) -> str:
    if record is None:
        return ""
    if record.error:
        return "failed" if quantity is SPEEDS[0] else ""
    text = quantity.text(record)
    if record.correct or not text:
        return text
    return f"{text} unchecked" if record.correct is None else f"{text} wrong"


def _values(records: Iterable[GenerationRecord], quantity: Quantity) -> dict[str, float]:
    found = {record.runner: quantity.value(record) for record in records if record.comparable}
    return {name: value for name, value in found.items() if value}


def _best(records: Iterable[GenerationRecord], quantity: Quantity) -> str | None:
    values = _values(records, quantity)
    if len(values) < 2:
        return None
    return (max if quantity.more else min)(values, key=lambda name: values[name])


def _ratio(mine: Mapping[str, GenerationRecord], names: Sequence[str], quantity: Quantity) -> str:
    """How many times better than the best baseline our first runner is."""
    ours = next((mine[name] for name in names if name in mine and mine[name].kind == "backend"), None)
    peers = _values((record for record in mine.values() if record.kind == "baseline"), quantity)
    value = None if ours is None or not ours.comparable else quantity.value(ours)
    if not value or not peers:
        return ""
    ratio = value / max(peers.values()) if quantity.more else min(peers.values()) / value
    return f"{ratio:.2f}x"


def number(value: float | None) -> str:
    """Three significant digits without an exponent; "" for None."""
    return "" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.3g}"
