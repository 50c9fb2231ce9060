"""Charts of results files, drawn with matplotlib: rooflines of operators, generation with whole models, host time, the
GEMM ladder. Perplexities have charts of their own (lab/quality_plots.py)."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flashkernel.core.figure import new_figure
from flashkernel.lab import first_use_tables, generation_tables, host_tables, ladder_tables
from flashkernel.lab.packages import require
from flashkernel.lab.results import GenerationRecord, Record
from flashkernel.lab.serve_records import ServeRecord
from flashkernel.lab.tables import Row, columns, rows

MAX_GROUPS = 24  # groups of bars in an operator's chart that can still be read
WIDTH = 14  # inches of a chart with two parts side by side


class PlotError(RuntimeError):
    """A results file has nothing to draw; the message says why."""


def plot(results: Mapping[str, Any], path: Path) -> None:
    """Draws the chart of one results file as a PNG. matplotlib's backend stays what it is.

    Operators get a roofline and percent of the roof by case, each operator of a suite its own; training steps ms and
    GB; whole models ("e2e") tokens/s and ms/token; loads of requests ("serve") tokens/s and times; host times us of
    flashkernel and of torch; first use s and ms; the GEMM ladder TFLOP/s of its rungs.

    Args:
        results: a results file as `results.load` returns it.
        path: the PNG file to write.

    Raises:
        PlotError: The file has nothing that can be drawn.
    """
    require("matplotlib.figure", "flashkernel plot")
    records = [record for record in results["records"] if record.comparable]
    if not records:
        raise PlotError(f"{path.stem}: no record is both correct and timed; there is nothing to draw")
    figure = new_figure("flashkernel plot", layout="constrained")
    ops = list(dict.fromkeys(record.op for record in records))
    if isinstance(records[0], ServeRecord):
        _serving(figure, records)
    elif isinstance(records[0], GenerationRecord):
        _generation(figure, records)
    elif records[0].op == host_tables.OP:
        _host(figure, records)
    elif records[0].op == ladder_tables.OP:
        _ladder(figure, records)
    elif records[0].op == first_use_tables.OP:
        _first_use(figure, records)
    elif all(record.roof is None for record in records):
        _times(figure, records)
    elif len(ops) > 1:
        _operators(figure, {op: [one for one in records if one.op == op] for op in ops}, results["ceilings"])
    else:
        _operator(figure, records, results["ceilings"])
    figure.suptitle(f"{ops[0] if len(ops) == 1 else path.stem} on {results['device']}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _operator(figure: Any, records: Sequence[Record], ceilings: Mapping[str, Any]) -> None:
    """The roofline on the left, percent of the roof by case on the right."""
    found, names = rows(records), columns(records)
    groups = found[:MAX_GROUPS]
    colors = _colors(names)
    left, right = _two_axes(figure, _bar_count(records))
    _roofline(left, records, ceilings, colors)
    _bars(right, [_label(row) for row in groups], _series(groups, names, lambda record: 100 * (record.roof or 0.0)))
    right.axvline(100, color="0.3", linewidth=1)
    some = "" if groups == found else f", the first {len(groups)} of {len(found)}"
    right.set(xlabel="% of the roof", title=f"percent of the measured roof{some}")


def _operators(figure: Any, by_op: Mapping[str, Sequence[Record]], ceilings: Mapping[str, Any]) -> None:
    """The operators of a suite, one above the other."""
    heights = [_height(_bar_count(records)) for records in by_op.values()]
    parts = figure.subfigures(len(by_op), 1, height_ratios=heights)
    for part, (op, records) in zip(parts, by_op.items()):
        _operator(part, records, ceilings)
        part.suptitle(op)
    figure.set_size_inches(WIDTH, sum(heights))


def _times(figure: Any, records: Sequence[Record]) -> None:
    """Median ms; where peak memory was measured, GB on the right."""
    groups, names = rows(records), columns(records)
    with_memory = any(record.peak_bytes for record in records)
    left, *right = _columns_of_axes(figure, len(groups) * (len(names) + 1), 2 if with_memory else 1)
    labels = [_label(row) for row in groups]
    _bars(left, labels, _series(groups, names, lambda record: record.p50))
    left.set(xlabel="ms (median)", title="time")
    for axes in right:
        memory = _series(groups, names, lambda record: None if record.peak_bytes is None else record.peak_bytes / 1e9)
        _bars(axes, labels, memory)
        axes.set(xlabel="GB", title="peak memory")


def _first_use(figure: Any, records: Sequence[Record]) -> None:
    """Seconds to compile each kernel on the left, ms to read it from the cache on the right."""
    kernels = list(dict.fromkeys(record.case for record in records))
    labels = ["\n".join(textwrap.wrap(kernel, 64)) for kernel in kernels]
    figure.set_size_inches(WIDTH, _height(2 * len(kernels)))
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, direction, scale in ((left, first_use_tables.COMPILED, 1e3), (right, first_use_tables.CACHED, 1.0)):
        times = {record.case: record.p50 / scale for record in records if record.direction == direction and record.p50}
        _bars(axes, labels, {direction: [times.get(kernel) for kernel in kernels]})
    right.invert_yaxis()  # both are drawn from the top: a shared axis was turned twice
    left.set(xlabel="s", title="compile")
    right.set(xlabel="ms (median)", title="from the cache")


def _generation(figure: Any, records: Sequence[GenerationRecord]) -> None:
    """Tokens/s on the left and ms/token on the right, by model, batch and runner; logarithmic."""
    names = generation_tables.columns(records)
    groups: dict[str, dict[str, GenerationRecord]] = {}
    for record in records:
        label = f"{record.model} {record.dtype}, batch {record.batch}\n{record.prompt} + {record.new} tokens"
        label += "" if record.period is None else f", repeats every {record.period}"
        groups.setdefault(label, {})[record.runner] = record
    left, right = _two_axes(figure, len(groups) * (len(names) + 1))
    quantities: list[tuple[Any, str, str, Callable[[GenerationRecord], float | None]]] = [
        (left, "tokens/s", "decoding, whole batch", lambda record: record.tokens_per_s),
        (right, "ms/token", "time of a decoding step", lambda record: record.ms_per_token),
    ]
    for axes, unit, title, value in quantities:
        series = {name: [value(found[name]) if name in found else None for found in groups.values()] for name in names}
        _bars(axes, list(groups), series, texts=True)
        axes.set(xscale="log", xlabel=unit, title=title)
        axes.margins(x=0.12)  # room for the values beside the bars


def _serving(figure: Any, records: Sequence[ServeRecord]) -> None:
    """Loads that came at once: tokens/s. Loads at a rate: p99 of the first and the next token, and goodput."""
    at_once = [record for record in records if record.rate is None]
    at_rates = [record for record in records if record.rate is not None]
    parts = list(figure.subfigures(2, 1)) if at_once and at_rates else [figure]
    bars = max(4.0, 0.3 * len(at_once)) if at_once else 0.0
    figure.set_size_inches(15 if at_rates else 10, bars + (5.0 if at_rates else 0.0))
    if at_once:
        labels = list(dict.fromkeys(f"{record.model} {record.load} {record.pass_name}" for record in at_once))
        names = list(dict.fromkeys(record.runner for record in at_once))
        found = {(f"{record.model} {record.load} {record.pass_name}", record.runner): record for record in at_once}
        series = {
            name: [found[label, name].out_tokens_per_s if (label, name) in found else None for label in labels]
            for name in names
        }
        axes = parts[0].subplots()
        _bars(axes, labels, series, texts=True)
        axes.set(xlabel="answer tokens/s", title="all requests at once")
    if at_rates:
        _serving_at_rates(parts[-1], at_rates)


def _serving_at_rates(figure: Any, records: Sequence[ServeRecord]) -> None:
    """p99 of the first and the next token, and goodput, against the rate; a line for each model, load, implementation
    and pass."""
    panels = figure.subplots(1, 3)
    quantities: list[tuple[str, Callable[[ServeRecord], float | None]]] = [
        ("first token, p99 ms", lambda record: None if record.ttft_ms is None else record.ttft_ms["p99"]),
        ("next token, p99 ms", lambda record: None if record.itl_ms is None else record.itl_ms["p99"]),
        ("goodput, % of requests", lambda record: None if record.goodput is None else 100 * record.goodput),
    ]
    for axes, (title, value) in zip(panels, quantities):
        lines: dict[str, list[tuple[float, float]]] = {}
        for record in records:
            found = value(record)
            if found is not None:
                label = f"{record.model} {record.load} {record.runner} {record.pass_name}"
                lines.setdefault(label, []).append((record.rate or 0.0, found))
        for label, points in lines.items():
            axes.plot(*zip(*sorted(points)), marker="o", label=label)
        axes.set(xlabel="requests/s", title=title)
        axes.set_xlim(left=0)
        axes.set_ylim(0, 105 if title.startswith("goodput") else None)  # 98% shall not look like nothing
        axes.grid(True, alpha=0.3)
        if lines:
            axes.legend(fontsize=8)


def _host(figure: Any, records: Sequence[Record]) -> None:
    """Host us of flashkernel and torch by function and direction, with the limits as marks."""
    found = host_tables.side_by_side(records)
    figure.set_size_inches(10, max(5.0, 0.3 * len(found)))
    axes = figure.subplots()
    series = {
        "flashkernel": [ours.host_us for ours, _ in found],
        "torch": [None if theirs is None else theirs.host_us for _, theirs in found],
    }
    _bars(axes, [f"{ours.case} {ours.direction}" for ours, _ in found], series)
    limits = [(ours.limit_us, index + 0.2) for index, (ours, _) in enumerate(found) if ours.limit_us]
    if limits:
        axes.scatter(*zip(*limits), marker="|", s=60, color="0.2", label="limit", zorder=3)
        axes.legend(fontsize=8)
    axes.margins(y=0.01)
    axes.set(xlabel="us (median)")
    axes.set_title(f"host time of a call\n{host_tables.DIRECTIONS}", fontsize=9)


def _ladder(figure: Any, records: Sequence[Record]) -> None:
    """TFLOP/s of each rung and of cuBLAS, with the share of cuBLAS beside the bars."""
    figure.set_size_inches(10, max(4.0, 0.45 * len(records)))
    axes = figure.subplots()
    several = len({record.key for record in records}) > 1
    labels = [record.implementation + (f", {record.case} {record.dtype}" if several else "") for record in records]
    shares = [ladder_tables.share(record, records) for record in records]
    colors = ["0.6" if record.kind == "baseline" else "C0" for record in records]
    bars = axes.barh(range(len(records)), [record.tflops or 0.0 for record in records], color=colors)
    texts = [f"{record.tflops or 0:.1f}" + (f" ({part:.1%})" if part else "") for record, part in zip(records, shares)]
    axes.bar_label(bars, texts, fontsize=8, padding=3)
    axes.set_yticks(range(len(records)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.2)  # room for the values beside the bars
    axes.set(xlabel="TFLOP/s (share of cuBLAS)", title=f"M = N = K = {records[0].case}, {records[0].dtype}")


def _roofline(axes: Any, records: Sequence[Record], ceilings: Mapping[str, Any], colors: Mapping[str, str]) -> None:
    """Arithmetic intensity against TFLOP/s, both logarithmic, under the measured ceilings."""
    points = [record for record in records if record.tflops and record.tbs]
    intensities = [record.tflops / record.tbs for record in points]  # type: ignore[operator]
    low, high = min(intensities, default=0.1) / 4, max(intensities, default=10.0) * 4
    for dtype in dict.fromkeys(record.dtype for record in points):
        peak, copy = ceilings["matmul_tflops"].get(dtype), ceilings["copy_tbs"]
        if peak is None:
            continue
        ridge = peak / copy
        line = sorted({low, min(max(ridge, low), high), high})
        axes.plot(line, [min(peak, copy * at) for at in line], color="0.3", linewidth=1.2)
        axes.annotate(f"{dtype}: {copy:.3g} TB/s, {peak:.3g} TFLOP/s", (low, copy * low), xytext=(4, 10),
                      textcoords="offset points", fontsize=8, color="0.3")  # fmt: skip
    for name, color in colors.items():
        mine = [(at, record.tflops) for at, record in zip(intensities, points) if record.implementation == name]
        if mine:
            axes.scatter(*zip(*mine), s=18, color=color, label=name, alpha=0.75)
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="TFLOP/s", title="roofline")
    axes.grid(True, which="major", alpha=0.3)
    if points:
        axes.legend(fontsize=8)


def _series(
    groups: Sequence[Row], names: Sequence[str], value: Callable[[Record], float | None]
) -> dict[str, list[float | None]]:
    """By implementation, a value for each group; None where it has no record."""
    return {name: [value(row.records[name]) if name in row.records else None for row in groups] for name in names}


def _bars(axes: Any, labels: Sequence[str], series: Mapping[str, Sequence[float | None]], texts: bool = False) -> None:
    """Horizontal bars: a group for each label, a color for each series; `texts` writes values beside the bars."""
    height = 0.8 / len(series)
    colors = _colors(list(series))
    for offset, (name, values) in enumerate(series.items()):
        drawn = [(index + offset * height, value) for index, value in enumerate(values) if value is not None]
        bars = axes.barh(*zip(*drawn), height=height, color=colors[name], label=name) if drawn else None
        if texts and bars is not None:
            axes.bar_label(bars, [generation_tables.number(value) for _, value in drawn], fontsize=7, padding=2)
    axes.set_yticks([index + 0.4 - height / 2 for index in range(len(labels))], labels, fontsize=8)
    axes.invert_yaxis()
    axes.legend(fontsize=8)


def _two_axes(figure: Any, bars: int) -> tuple[Any, Any]:
    """Two axes side by side, high enough for so many bars."""
    left, right = _columns_of_axes(figure, bars, 2)
    return left, right


def _columns_of_axes(figure: Any, bars: int, count: int) -> list[Any]:
    """Axes side by side, high enough for so many bars. What holds a part of a figure sizes the whole itself."""
    if hasattr(figure, "set_size_inches"):
        figure.set_size_inches(WIDTH, _height(bars))
    return list(figure.subplots(1, count, squeeze=False)[0])


def _height(bars: int) -> float:
    return max(5.0, 0.22 * bars)


def _bar_count(records: Sequence[Record]) -> int:
    """Bars of an operator's chart, with one of space between groups."""
    return min(len(rows(records)), MAX_GROUPS) * (len(columns(records)) + 1)


def _colors(names: Sequence[str]) -> dict[str, str]:
    return {name: f"C{index % 10}" for index, name in enumerate(names)}


def _label(row: Row) -> str:
    return f"{row.case} {row.dtype} {row.direction}"
