"""Records as tables: on the terminal, as CSV or JSON, and as markdown in the docs.

What stands in a README between `<!-- results:rms_norm -->` and `<!-- /results -->` is regenerated from `results/`;
`<!-- results:rms_norm 16384x* -->` keeps the cases that match the glob, and `<!-- results:attention long-* memory -->`
shows the peak memory instead of times. `<!-- results:e2e llama-3.2-1b-* -->` does the same for whole models.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashkernel.lab import generation_tables
from flashkernel.lab.results import Generation, Record, load_folder

if TYPE_CHECKING:
    from rich.table import Table

BLOCK = re.compile(
    r"(<!-- results:(?P<op>\w+)(?: (?P<glob>[^\s-]\S*))?(?P<memory> memory)? -->\n).*?(<!-- /results -->)", re.DOTALL
)
DOCUMENTS = ("README.md", "flashkernel/ops/**/README.md", "flashkernel/engine/README.md", "docs/**/*.md")
UNMEASURED = "_Not measured yet._"
MEMORY = "memory"


@dataclass(frozen=True)
class Row:
    """One case, dtype and direction with all that was measured on it."""

    case: str
    dtype: str
    direction: str
    records: Mapping[str, Record]  # by implementation, ours first

    @property
    def fastest(self) -> str | None:
        return self._least(self.records.values())

    def ratio(self, statistic: str = "p50") -> float | None:
        """How many times faster than the best baseline, or less in memory, the backend is that dispatch picks first."""
        ours = next((record for record in self.records.values() if record.kind == "backend"), None)
        if ours is None or not ours.counts:
            return None
        mine = _number(ours, statistic)
        peers = [record for record in self.records.values() if record.kind == "baseline" and record.counts]
        theirs = [value for value in (_number(record, statistic) for record in peers) if value is not None]
        return min(theirs) / mine if theirs and mine else None

    @staticmethod
    def _least(records: Iterable[Record]) -> str | None:
        comparable = [record for record in records if record.counts]
        return min(comparable, key=lambda record: record.p50 or 0.0).implementation if comparable else None


def _number(record: Record, statistic: str) -> float | None:
    return record.peak_bytes if statistic == MEMORY else None if record.ms is None else record.ms[statistic]


def rows(records: Iterable[Record]) -> list[Row]:
    """Records grouped by case, dtype and direction, in the order they were measured."""
    grouped: dict[tuple[str, str, str], dict[str, Record]] = {}
    for record in records:
        grouped.setdefault((record.case, record.dtype, record.direction), {})[record.implementation] = record
    return [Row(*key, found) for key, found in grouped.items()]


def columns(records: Iterable[Record]) -> list[str]:
    """The implementations, ours first."""
    ordered = sorted(records, key=lambda record: record.kind != "backend")
    return list(dict.fromkeys(record.implementation for record in ordered))


def rich_table(op: str, records: Sequence[Record], title: str = "") -> Table:
    """A terminal table: milliseconds and share of the roof; the best in bold, what failed its check in red."""
    from rich.table import Table

    table = Table(title=title or op, title_justify="left")
    for heading in ("case", "dtype", "direction"):
        table.add_column(heading, no_wrap=True)
    names = columns(records)
    for name in names:
        table.add_column(name, justify="right")
    table.add_column("vs best peer", justify="right")
    for row in rows(records):
        cells = [rich_cell(row.records.get(name), name == row.fastest) for name in names]
        table.add_row(row.case, row.dtype, row.direction, *cells, _ratio(row))
    return table


def remarks(records: Iterable[Record]) -> list[str]:
    """What a table cannot hold: why an implementation failed or was wrong."""
    return [
        f"{record.op} {record.case} {record.dtype} {record.direction} {record.implementation}: "
        + (record.error or f"wrong: {record.note}")
        for record in records
        if record.error or not record.correct
    ]


def line(records: Sequence[Record]) -> str:
    """A case in one line: the medians of each direction."""
    first = records[0]
    parts = [
        f"{row.direction} " + ", ".join(f"{name} {_cell(record)}" for name, record in row.records.items())
        for row in rows(records)
    ]
    return f"{first.op} {first.case} {first.dtype}: " + "; ".join(parts)


def markdown(records: Sequence[Record], statistic: str = "p50") -> str:
    """A markdown table of milliseconds (median) and share of the roof, or of the peak "memory"."""
    names = columns(records)
    lines = [
        "| " + " | ".join(["case", "dtype", "direction", *names, "vs best peer"]) + " |",
        "| " + " | ".join(["---"] * 3 + ["---:"] * (len(names) + 1)) + " |",
    ]
    for row in rows(records):
        cells = []
        for name in names:
            text = _cell(row.records.get(name), statistic)
            cells.append(f"**{text}**" if name == row.fastest and statistic != MEMORY else text)
        lines.append("| " + " | ".join([row.case, row.dtype, row.direction, *cells, _ratio(row, statistic)]) + " |")
    return "\n".join(lines)


def as_csv(values: Sequence[Mapping[str, Any]]) -> str:
    """Flat CSV: nested mappings become columns such as `ms.p50`, axes one column."""
    flat = [_flattened(value) for value in values]
    names = list(dict.fromkeys(name for value in flat for name in value))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def as_json(values: Any) -> str:
    return json.dumps(values, indent=1, default=str)


def regenerate(text: str, results: Path) -> str:
    """A document with its result blocks written anew."""
    folders = sorted(folder for folder in results.glob("*") if folder.is_dir())
    measured = {folder.name: load_folder(folder) for folder in folders}

    def renew(found: re.Match[str]) -> str:
        return (
            found[1]
            + _block(found["op"], found["glob"], MEMORY if found["memory"] else "p50", measured)
            + "\n"
            + found[5]
        )

    return BLOCK.sub(renew, text)


def documents(root: Path) -> list[Path]:
    """The documents under `root` that may hold result blocks."""
    return sorted(path for pattern in DOCUMENTS for path in root.glob(pattern))


def _block(op: str, glob: str | None, statistic: str, measured: Mapping[str, Mapping[str, Any]]) -> str:
    parts = []
    for gpu, files in measured.items():
        if op not in files:
            continue
        found = files[op]
        records = [record for record in found["records"] if glob is None or fnmatchcase(record.case, glob)]
        if not records:
            continue
        copy = found["ceilings"].get("copy_tbs")
        versions = ", ".join(
            f"{name} {found['versions'][name]}" for name in ("torch", "triton") if name in found["versions"]
        )
        if op == Generation.op:
            shown, table = _models(records, statistic, copy)
        else:
            shown = f"median ms and share of the roof (copy {copy:.2f} TB/s)"
            if statistic == MEMORY:
                shown = "peak memory, in GB, beyond what was allocated before"
            table = markdown(records, statistic)
        parts.append(f"{found['device']}, {versions}; {shown}; from `results/{gpu}/{op}.json`.\n\n{table}")
    return "\n\n".join(parts) or UNMEASURED


def _models(records: Sequence[Generation], statistic: str, copy: float) -> tuple[str, str]:
    """What a table of whole models shows, and the table."""
    lengths = dict.fromkeys(f"prompts of {record.prompt} tokens, {record.new} new" for record in records)
    if statistic == MEMORY:
        return f"{'; '.join(lengths)}", generation_tables.markdown(records, generation_tables.COSTS)
    shown = f"{'; '.join(lengths)}; share of the floor that reading weights and cache sets (copy {copy:.2f} TB/s)"
    return shown, generation_tables.markdown(records)


def rich_cell(record: Record | None, best: bool = False, statistic: str = "p50") -> str:
    """Milliseconds and share of the roof, in red where they claim nothing."""
    text = _cell(record, statistic)
    if record is not None and (record.error or not record.correct):
        return f"[red]{text}[/red]"
    return f"[bold]{text}[/bold]" if best else text


def _cell(record: Record | None, statistic: str = "p50") -> str:
    if record is None:
        return ""
    if record.error:
        return "failed"
    if record.ms is None:
        return "wrong"
    if statistic == MEMORY:
        return "" if record.peak_bytes is None else f"{record.peak_bytes / 1e9:.3g}"
    speed = milliseconds(record.ms[statistic])
    if not record.correct:
        return f"{speed} wrong"
    return speed if record.roof is None else f"{speed} ({record.roof:.0%})"


def milliseconds(value: float) -> str:
    """Three significant digits, and no exponents: 0.00412, 0.412, 41.2, 4120."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}" if value >= 0.001 else f"{value:.6f}"


def _ratio(row: Row, statistic: str = "p50") -> str:
    ratio = row.ratio(statistic)
    return "" if ratio is None else f"{ratio:.2f}x"


def _flattened(value: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, item in value.items():
        if name == "axes":
            flat[name] = " ".join(f"{axis}={size}" for axis, size in item.items())
        elif isinstance(item, Mapping):
            flat.update({f"{name}.{inner}": nested for inner, nested in item.items()})
        else:
            flat[name] = item
    return flat
