"""Charts of results: where each measurement stands under the roof. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flashkernel.lab.results import Record
from flashkernel.lab.tables import Row, columns, rows

MOST_BARS = 24  # groups in a bar chart that can still be read


class PlotError(RuntimeError):
    """A chart cannot be drawn; the message says what is missing."""


def plot(results: Mapping[str, Any], path: Path) -> None:
    """Draw one operator's results: the roofline on the left, shares of the roof by case on the right."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotError(f"charts need matplotlib ({error}); pip install 'flashkernel[plot]'") from error
    records = [record for record in results["records"] if record.counts]
    if not records:
        raise PlotError(f"{path.stem}: no record was both right and timed; there is nothing to draw")
    groups = rows(records)[:MOST_BARS]
    names = columns(records)
    colours = {name: f"C{index % 10}" for index, name in enumerate(names)}
    figure = Figure(figsize=(14, max(5.0, 0.22 * len(groups) * (len(names) + 1))), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _roofline(left, records, results["ceilings"], colours)
    _bars(right, groups, names, colours)
    figure.suptitle(f"{records[0].op} on {results['device']}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _roofline(axes: Any, records: Sequence[Record], ceilings: Mapping[str, Any], colours: Mapping[str, str]) -> None:
    """Arithmetic intensity against rate, both logarithmic, under the measured ceilings."""
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
    for name, colour in colours.items():
        mine = [(at, record.tflops) for at, record in zip(intensities, points) if record.implementation == name]
        if mine:
            axes.scatter(*zip(*mine), s=18, color=colour, label=name, alpha=0.75)
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="TFLOP/s", title="roofline")
    axes.grid(True, which="major", alpha=0.3)
    if points:
        axes.legend(fontsize=8)


def _bars(axes: Any, groups: Sequence[Row], names: Sequence[str], colours: Mapping[str, str]) -> None:
    """Share of the roof, a group of bars for each case and direction."""
    height = 0.8 / len(names)
    for offset, name in enumerate(names):
        places = [index + offset * height for index, row in enumerate(groups) if name in row.records]
        shares = [100 * (row.records[name].roof or 0.0) for row in groups if name in row.records]
        axes.barh(places, shares, height=height, color=colours[name], label=name)
    middle = 0.4 - height / 2
    labels = [f"{row.case} {row.dtype} {row.direction}" for row in groups]
    axes.set_yticks([index + middle for index in range(len(groups))], labels, fontsize=8)
    axes.invert_yaxis()
    axes.axvline(100, color="0.3", linewidth=1)
    axes.set(xlabel="percent of the roof", title="share of the measured roof")
    axes.legend(fontsize=8)
