"""Tables of operator benchmarks: on the terminal, as CSV or JSON, and as markdown in the docs.

`flashkernel tables --write` regenerates the text between `<!-- results:rms_norm -->` and `<!-- /results -->` in the
docs from `results/`. `<!-- results:rms_norm 16384x* -->` keeps the cases that match the glob,
`<!-- results:attention d* dtype=bfloat16 -->` those of one dtype, `<!-- results:attention long-* memory -->` shows peak
memory instead of times, and
`<!-- results:e2e llama-3.2-1b-* -->` shows whole models; the name is that of the results file. Tables made of several
files are report blocks (`report_blocks`), and `<!-- results:cuda_resources ops/attention/* -->` shows what compiled
CUDA C++ kernels take (lab/cuda_resources.py); `<!-- results:quality -->` shows perplexities (lab/quality.py),
`<!-- results:moe_study -->` losses by router (lab/moe_study.py).
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

from flashkernel.lab import first_use_tables, generation_tables, host_tables, ladder_tables, moe_study, serve_records
from flashkernel.lab.generation_tables import RATIO
from flashkernel.lab.results import CUDA_RESOURCES, MOE_STUDY, QUALITY, GenerationRecord, Record, load_folder
from flashkernel.lab.serve_records import ServeRecord

if TYPE_CHECKING:
    from rich.table import Table

    from flashkernel.core.roofline import Ceilings

BLOCK = re.compile(
    r"(<!-- results:(?P<op>\w+)(?: (?!dtype=)(?P<glob>[^\s-]\S*))?(?: dtype=(?P<dtype>\w+))?(?P<memory> memory)? -->\n)"
    r".*?(?P<end><!-- /results -->)",
    re.DOTALL,
)
DOCUMENTS = ("README.md", "flashkernel/**/README.md", "docs/**/*.md")
UNMEASURED = "_Not measured yet._"
MEMORY = "memory"
DIRECTIONS = {"fwd": "forward", "bwd": "backward alone", "fwd+bwd": "forward and backward"}


@dataclass(frozen=True)
class Row:
    """The records of one case, dtype and direction."""

    case: str
    dtype: str
    direction: str
    records: Mapping[str, Record]  # by implementation, ours first

    @property
    def fastest(self) -> str | None:
        return self._least(self.records.values())

    def ratio(self, statistic: str = "p50") -> float | None:
        """Time (or memory) of the best baseline divided by ours, the backend that dispatch picks; None without both."""
        ours = next((record for record in self.records.values() if record.kind == "backend"), None)
        if ours is None or not ours.comparable:
            return None
        mine = _number(ours, statistic)
        peers = [record for record in self.records.values() if record.kind == "baseline" and record.comparable]
        theirs = [value for value in (_number(record, statistic) for record in peers) if value is not None]
        return min(theirs) / mine if theirs and mine else None

    @staticmethod
    def _least(records: Iterable[Record]) -> str | None:
        comparable = [record for record in records if record.comparable]
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


def rich_table(
    op: str, records: Sequence[Record], device: str = "", ceilings: Ceilings | None = None, statistic: str = "p50"
) -> Table:
    """A terminal table of median ms and percent of the roof, or of peak memory in GB.

    The fastest of a row is bold; implementations that failed their check are red.
    """
    from rich.table import Table

    names, grouped = columns(records), rows(records)
    with_roof = statistic != MEMORY and any(record.roof is not None for record in records)
    where = f" on {device}" if device else ""
    dtypes = ", ".join(dict.fromkeys(record.dtype for record in records))
    what = (
        "peak memory in GB" if statistic == MEMORY else "median time in ms" + (" (% of the roof)" if with_roof else "")
    )
    table = Table(title=f"{op}{where}, {dtypes}: {what}", title_justify="left", caption_justify="left")
    table.caption = _caption(records, ceilings if with_roof else None)
    for heading in ("case", "dtype", "direction"):
        table.add_column(heading, no_wrap=True)
    if with_roof:
        table.add_column("roof", no_wrap=True)
    unit = "GB" if statistic == MEMORY else "ms (% of roof)" if with_roof else "ms"
    for name in names:
        table.add_column(f"{name}\n{unit}", justify="right")
    table.add_column(RATIO, justify="right")
    for row in grouped:
        cells = [
            rich_cell(row.records.get(name), name == row.fastest and statistic != MEMORY, statistic) for name in names
        ]
        head = [row.case, row.dtype, row.direction, *([roof(row, ceilings)] if with_roof else [])]
        table.add_row(*head, *cells, _ratio(row, statistic))
    return table


def roof(row: Row, ceilings: Ceilings | None) -> str:
    """The ceiling that bounds a row: "memory 4.23 TB/s" or "compute 795 TFLOP/s"."""
    bound = next((record.bound for record in row.records.values() if record.bound), None)
    if bound is None or ceilings is None:
        return bound or ""
    if bound == "memory":
        return f"memory {_rate(ceilings.copy_tbs, 'B/s')}"
    rate = ceilings.matmul_tflops.get(row.dtype)
    return bound if rate is None else f"compute {_rate(rate, 'FLOP/s')}"


def _rate(tera: float, unit: str) -> str:
    """ "4.23 TB/s", or "32.1 GB/s" below 1 TB/s."""
    return f"{tera:.3g} T{unit}" if tera >= 1 else f"{tera * 1e3:.3g} G{unit}"


def _caption(records: Sequence[Record], ceilings: Ceilings | None) -> str:
    """What the abbreviations of a terminal table mean."""
    parts = [
        f"{name}: {DIRECTIONS[name]}" for name in dict.fromkeys(one.direction for one in records) if name in DIRECTIONS
    ]
    if any(record.kind == "baseline" for record in records):
        parts.append(f"{RATIO}: the best baseline's value divided by ours")
    if ceilings is not None:
        parts.append("roof: least time at the measured copy bandwidth or matmul rate, whichever bounds the case")
    return "; ".join(parts)


def failure_messages(records: Iterable[Record]) -> list[str]:
    """Why implementations failed or were wrong, a line each."""
    return [
        f"{record.op} {record.case} {record.dtype} {record.direction} {record.implementation}: "
        + (record.error or f"wrong: {record.note}")
        for record in records
        if record.error or not record.correct
    ]


def line(records: Sequence[Record]) -> str:
    """One case in a line of a log: the median ms of each direction and implementation."""
    first = records[0]
    parts = [
        f"{row.direction} " + ", ".join(f"{name} {_cell_with_units(record)}" for name, record in row.records.items())
        for row in rows(records)
    ]
    return f"{first.op} {first.case} {first.dtype}: " + "; ".join(parts)


def _cell_with_units(record: Record) -> str:
    if not record.comparable or record.ms is None:
        return _cell(record)
    share = "" if record.roof is None else f" ({record.roof:.0%} of roof)"
    return f"{milliseconds(record.ms['p50'])} ms{share}"


def markdown(records: Sequence[Record], statistic: str = "p50") -> str:
    """A markdown table of median ms and percent of the roof, or of peak "memory" in GB; the caption says which."""
    names = columns(records)
    lines = [
        "| " + " | ".join(["case", "dtype", "direction", *names, RATIO]) + " |",
        "| " + " | ".join(["---"] * 3 + ["---:"] * (len(names) + 1)) + " |",
    ]
    for row in rows(records):
        cells = []
        for name in names:
            text = _cell(row.records.get(name), statistic)
            cells.append(f"**{text}**" if name == row.fastest and statistic != MEMORY else text)
        lines.append("| " + " | ".join([row.case, row.dtype, row.direction, *cells, _ratio(row, statistic)]) + " |")
    return "\n".join(lines)


def rich_from_markdown(text: str, title: str) -> Table:
    """A markdown table for the terminal, under a title; the cells are shown as they are."""
    from rich.markup import escape
    from rich.table import Table

    headings, rules, *cells = ([cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines())
    table = Table(title=escape(title), title_justify="left")
    for heading, rule in zip(headings, rules):
        table.add_column(escape(heading), justify="right" if rule.endswith(":") else "left")
    for row in cells:
        table.add_row(*map(escape, row))
    return table


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
    """The document with its result blocks regenerated from the files of `results`."""
    folders = sorted(folder for folder in results.glob("*") if folder.is_dir())
    measured = {folder.name: load_folder(folder) for folder in folders}

    def renew(found: re.Match[str]) -> str:
        if found["op"] == Path(CUDA_RESOURCES).stem:
            return f"{found[1]}{_resources_block(results, found['glob'])}\n{found['end']}"
        if found["op"] == Path(QUALITY).stem:
            from flashkernel.lab import quality  # it imports the engine

            return f"{found[1]}{quality.block(results) or UNMEASURED}\n{found['end']}"
        if found["op"] == Path(MOE_STUDY).stem:
            return f"{found[1]}{moe_study.block(results) or UNMEASURED}\n{found['end']}"
        statistic = MEMORY if found["memory"] else "p50"
        block = _block(found["op"], found["glob"], found["dtype"], statistic, measured)
        return f"{found[1]}{block}\n{found['end']}"

    text = BLOCK.sub(renew, text)
    if "<!-- report:" not in text:
        return text
    from flashkernel.lab import report_blocks  # reads operators' declarations, which most documents do not need

    return report_blocks.regenerate(text, results, measured)


def _resources_block(results: Path, glob: str | None) -> str:
    from flashkernel.lab import cuda_resources  # it imports the operators

    saved = cuda_resources.load(results)
    table = "" if saved is None else cuda_resources.markdown(saved, glob)
    if saved is None or not table:
        return UNMEASURED
    what = "registers of a thread and shared memory of a block; nothing is spilled unless it says so"
    return f"{saved['compiler']}; {what}; from `results/{CUDA_RESOURCES}`.\n\n{table}"


def documents(root: Path) -> list[Path]:
    """The documents under `root` that may hold result blocks."""
    return sorted(path for pattern in DOCUMENTS for path in root.glob(pattern))


def _block(
    op: str, glob: str | None, dtype: str | None, statistic: str, measured: Mapping[str, Mapping[str, Any]]
) -> str:
    parts = []
    for gpu, files in measured.items():
        if op not in files:
            continue
        found = files[op]
        records = [
            record
            for record in found["records"]
            if (glob is None or fnmatchcase(record.case, glob)) and (dtype is None or record.dtype == dtype)
        ]
        if statistic == MEMORY:  # not measured on every CPU
            records = [record for record in records if not isinstance(record, GenerationRecord) or record.peak_bytes]
        if not records:
            continue
        versions = ", ".join(
            f"{name} {found['versions'][name]}" for name in ("torch", "triton") if name in found["versions"]
        )
        shown, table = _described(op, records, statistic, _ceilings(found))
        parts.append(f"{found['device']}, {versions}; {shown}; from `results/{gpu}/{op}.json`.\n\n{table}")
    return "\n\n".join(parts) or UNMEASURED


def _ceilings(found: Mapping[str, Any]) -> Mapping[str, Any]:
    """The ceilings of a file's last run, with the rates of dtypes that only earlier runs have."""
    rates: dict[str, float] = {}
    for run in (*found.get("earlier", ()), found):
        rates |= run["ceilings"].get("matmul_tflops", {})
    return {**found["ceilings"], "matmul_tflops": rates}


def _described(op: str, records: Sequence[Any], statistic: str, ceilings: Mapping[str, Any]) -> tuple[str, str]:
    """(what a markdown table shows and in which units, the table)."""
    copy = ceilings.get("copy_tbs", 0.0)
    bandwidth = f"copy {copy:.2f} TB/s" if copy >= 0.5 else f"copy {copy * 1e3:.3g} GB/s"
    if op == host_tables.OP:
        return f"median host time of a call in us ({host_tables.DIRECTIONS})", host_tables.markdown(records)
    if op == first_use_tables.OP:
        return "time of a kernel's first use", first_use_tables.markdown(records)
    if op == ladder_tables.OP:
        products = ", ".join(dict.fromkeys(f"M = N = K = {record.case}, {record.dtype}" for record in records))
        return f"{products}; TFLOP/s of the median time", ladder_tables.markdown(records)
    if isinstance(records[0], ServeRecord):
        return "loads of requests; times are p50 / p90 / p99", serve_records.table(records)
    if not isinstance(records[0], GenerationRecord):
        if statistic == MEMORY:
            return "peak memory in GB, beyond what was allocated before the call", markdown(records, statistic)
        if all(record.roof is None for record in records):
            return "median ms", markdown(records)
        bound = dict.fromkeys(record.dtype for record in records if record.bound == "compute")
        rates = {name: ceilings["matmul_tflops"][name] for name in bound if name in ceilings["matmul_tflops"]}
        roofs = ", ".join([bandwidth, *(f"{name} matmul {rate:.0f} TFLOP/s" for name, rate in rates.items())])
        return f"median ms, in brackets % of the roof ({roofs})", markdown(records)
    lengths = "; ".join(dict.fromkeys(map(generation_tables.lengths, records)))
    if statistic == MEMORY:
        return lengths, generation_tables.markdown(records, generation_tables.COSTS)
    return f"{lengths}; {generation_tables.IN_BRACKETS} ({bandwidth})", generation_tables.markdown(records)


def rich_cell(record: Record | None, best: bool = False, statistic: str = "p50") -> str:
    """Milliseconds and percent of the roof; red where the implementation failed its check."""
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
    """Three significant digits without an exponent.

    Example:
        >>> milliseconds(0.0041234), milliseconds(41.234), milliseconds(4123.4)
        ('0.00412', '41.2', '4123')
    """
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
