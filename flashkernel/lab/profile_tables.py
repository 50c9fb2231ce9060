"""Tables of profiles: one kernel per row on the terminal, one case per row in the docs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flashkernel.lab.profile_records import KernelProfile, ProfileRecord

if TYPE_CHECKING:
    from rich.table import Table

MIN_SHARE = 0.02  # of a case's time: kernels below it are counted, not shown
HEADINGS = (
    "us", "% of roof", "FLOP/B", "occupancy", "DRAM", "L2", "SM", "tensor", "regs", "shared KB", "main stalls",
)  # fmt: skip
_STALLS = HEADINGS.index("main stalls")
CAPTION = (
    "us: of all launches; roof: the operator's least time at the measured bandwidth or matmul rate / the time of its "
    "kernels; occupancy: achieved/theoretical; DRAM, L2, SM, tensor: % of peak throughput; stalls: cycles that a warp "
    "waits per issued instruction; bound by: the busiest unit if it is above 60% of peak, else latency"
)


def rich_table(records: Sequence[ProfileRecord], device: str = "") -> Table:
    """A terminal table: the kernels of each record, and what bounds each of them."""
    from rich.markup import escape
    from rich.table import Table

    tools = {record.tool for record in records}
    how = " and ".join({"ncu": "Nsight Compute", "torch": "torch's profiler"}[tool] for tool in sorted(tools))
    title = "profiles" + (f" on {device}" if device else "") + (f", by {how}" if how else "")
    table = Table(title=title, title_justify="left", caption=CAPTION, caption_justify="left")
    table.add_column("operator, case, backend")
    table.add_column("kernel, and what bounds it")
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "main stalls" else "right")
    for record in records:
        what = f"{record.op} {record.direction}\n{record.case}\n{record.implementation}, {record.dtype}"
        if record.error is not None or not record.kernels:
            table.add_row(escape(what), f"[red]{escape(record.meaning)}[/red]", end_section=True)
            continue
        for index, kernel in enumerate(shown(record)):
            name = f"{escape(_launches(kernel))}\n[bold]{escape(kernel.meaning)}[/bold]"
            cells = _cells(record, kernel, index == 0)
            cells[_STALLS] = cells[_STALLS].replace(", ", "\n")
            table.add_row(escape(what) if index == 0 else "", name, *map(escape, cells))
        hidden = len(record.kernels) - len(shown(record))
        if hidden:
            table.add_row("", f"and {hidden} more, under {MIN_SHARE:.0%} of the time each")
        table.add_section()
    return table


def shown(record: ProfileRecord) -> list[KernelProfile]:
    """The kernels that take a visible share of the time, the longest first."""
    total = sum(kernel.duration_us for kernel in record.kernels)
    longest = sorted(record.kernels, key=lambda kernel: -kernel.duration_us)
    return [kernel for kernel in longest if kernel.duration_us >= MIN_SHARE * total]


def markdown(records: Sequence[ProfileRecord]) -> str:
    """A markdown table: a row for each case and direction, with the counters of the kernel that takes most time."""
    heads = ["operator", "case", "backend", "direction", "kernel", *HEADINGS, "bound by"]
    lines = ["| " + " | ".join(heads) + " |"]
    lines.append("| " + " | ".join(["---"] * 5 + ["---:"] * 10 + ["---"] * 2) + " |")
    for record in records:
        head = [record.op, f"{record.case}, {record.dtype}", record.implementation, record.direction]
        main = record.main
        if record.error is not None or main is None:
            cells = [_cell(record.meaning), *[""] * (len(HEADINGS) + 1)]
        else:
            others = len(record.kernels) - 1
            name = f"`{_cell(main.name)}`" + (f" and {others} more" if others else "")
            cells = [name, *_cells(record, main, True), main.limiter or ""]
        lines.append("| " + " | ".join([*head, *cells]) + " |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _launches(kernel: KernelProfile) -> str:
    where = f" <<<{kernel.grid}, {kernel.block}>>>" if kernel.grid and kernel.block else ""
    return f"{kernel.name}{where}" + (f" x {kernel.launches}" if kernel.launches > 1 else "")


def _cells(record: ProfileRecord, kernel: KernelProfile, first: bool) -> list[str]:
    """The figures of a kernel; those of the whole record only where it is the first one."""
    occupancy = [_number(kernel.achieved_occupancy), _number(kernel.theoretical_occupancy)]
    shared = [value for value in (kernel.shared_static, kernel.shared_dynamic) if value is not None]
    stalls = ", ".join(f"{name} {cycles:.1f}" for name, cycles in (kernel.stalls or {}).items())
    return [
        f"{kernel.duration_us:.1f}",
        "" if record.roof is None or not first else f"{record.roof:.0%}",
        "" if record.intensity is None or not first else f"{record.intensity:.3g}",
        "/".join(occupancy) if all(occupancy) else "",
        *(_number(value) for value in (kernel.dram_pct, kernel.l2_pct, kernel.sm_pct, kernel.tensor_pct)),
        "" if kernel.registers is None else str(kernel.registers),
        f"{sum(shared) / 1024:.1f}" if shared else "",
        stalls,
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}%"
