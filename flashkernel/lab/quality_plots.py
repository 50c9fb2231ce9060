"""Charts of perplexity: against the bits of an element, and against the speed that fewer bits give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashkernel.core.figure import new_figure
from flashkernel.lab.engine_options import EngineOptions, options_of
from flashkernel.lab.packages import require
from flashkernel.lab.plot import PlotError
from flashkernel.lab.results import GenerationRecord, Record

if TYPE_CHECKING:
    from flashkernel.lab.quality import QualityRecord

PLAIN = "bfloat16"  # the format of weights that are not quantized
PRODUCT, PRODUCT_BASELINE = "quantized_linear", "cublas"
PRODUCT_ROWS = (1, 16, 64)
ACTIVATIONS = ("int8-activations", "int8-smoothquant")  # configurations that quantize x too


@dataclass(frozen=True)
class Gains:
    """How many times as fast as plain weights each format is, in one measurement."""

    title: str
    by_format: Mapping[str, float]


def plot_quality(records: Sequence[QualityRecord], path: Path) -> None:
    """Draws perplexity against the bits of an element as a PNG: weights on the left, keys and values on the right.

    Args:
        records: of one model, as `quality.load` returns them.
        path: the PNG file to write.
    """
    if not records:
        raise PlotError(f"{path.stem}: there are no records; there is nothing to draw")
    caches = [record for record in records if record.kv_cache or record.format == PLAIN]
    figure = _figure(2)
    left, right = figure.subplots(1, 2)
    for axes, title, drawn in ((left, "weights", _of_weights(records)), (right, "keys and values", caches)):
        points = [(record.bits if axes is left else record.kv_bits or 16.0, record) for record in drawn]
        _scatter(axes, points)
        axes.set(xlabel="bits of an element, scales included", title=title)
    figure.suptitle(f"{records[0].model}: perplexity of {records[0].tokens} tokens against size")
    _save(figure, path)


def plot_quality_against_speed(
    records: Sequence[QualityRecord], files: Mapping[str, Mapping[str, Any]], path: Path
) -> None:
    """Draws perplexity against speed as a PNG, a panel for each measurement that has quantized and plain weights.

    Args:
        records: perplexities of one model, as `quality.load` returns them.
        files: results files by name, as `results.find` returns them; what has no quantized weights is passed over.
        path: the PNG file to write.
    """
    panels = gains_of_engines(files, records) + gains_of_products(files)
    if not records or not panels:
        raise PlotError(f"{path.stem}: no file has both quantized and plain weights; there is nothing to draw")
    figure = _figure(len(panels))
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
        found = {**panel.by_format, PLAIN: 1.0}
        drawn = [one for one in _of_weights(records) if one.configuration not in ACTIVATIONS]
        _scatter(axes, [(found[one.format], one) for one in drawn if one.format in found])
        axes.axvline(1.0, color="0.5", linewidth=0.8)
        axes.set(xlabel="times as fast as plain weights", title=panel.title)
        axes.title.set_fontsize(9)
    figure.suptitle(f"{records[0].model}: perplexity of {records[0].tokens} tokens against speed")
    _save(figure, path)


def gains_of_engines(files: Mapping[str, Mapping[str, Any]], records: Sequence[QualityRecord]) -> list[Gains]:
    """Tokens/s of the engine with quantized weights over those with plain ones: a panel for each model and batch."""
    panels = []
    for file in files.values():
        ran = [one for one in file["records"] if isinstance(one, GenerationRecord) and one.comparable]
        groups: dict[tuple[Any, ...], dict[str, float]] = {}
        for one in ran:
            if options_of(one) == EngineOptions(one.quantization) and one.implementation == "engine":
                key = (one.model, one.dtype, one.batch, one.prompt, one.new, one.period)
                groups.setdefault(key, {})[one.quantization or PLAIN] = one.tokens_per_s or 0.0
        for key, speeds in groups.items():
            if len(speeds) > 1 and speeds.get(PLAIN):
                gains = {format: speed / speeds[PLAIN] for format, speed in speeds.items() if format != PLAIN}
                panels.append(Gains(f"engine, {key[0]}, batch {key[2]}\n{file['device']}", gains))
    measured = {record.model for record in records}
    same = [panel for panel in panels if any(f" {model}" in panel.title for model in measured)]
    return same or panels  # the model that has perplexities, where it was timed


def gains_of_products(files: Mapping[str, Mapping[str, Any]]) -> list[Gains]:
    """cuBLAS's time over ours, with x in 16 bits: for some numbers of rows, the product with the most formats."""
    panels = []
    for file in files.values():
        found: dict[tuple[int, int, int], dict[str, float]] = {}
        records = [one for one in file["records"] if isinstance(one, Record) and one.op == PRODUCT and one.comparable]
        for case in dict.fromkeys(one.case for one in records):
            same = [one for one in records if one.case == case]
            ours = [one.p50 for one in same if one.kind == "backend" and one.p50]
            plain = [one.p50 for one in same if one.implementation == PRODUCT_BASELINE and one.p50]
            axes = same[0].axes
            if ours and plain and " x:" not in axes["layout"]:
                format = str(axes["layout"]).split()[0].removesuffix("_tiles")
                gains = found.setdefault((axes["rows"], axes["inner"], axes["columns"]), {})
                gains[format] = max(gains.get(format, 0.0), plain[0] / min(ours))
        for rows in PRODUCT_ROWS:
            chosen = [key for key in found if key[0] == rows]
            if chosen:
                best = max(chosen, key=lambda key: (len(found[key]), key[1] * key[2]))
                title = f"product of {rows} row{'s' if rows > 1 else ''}, {best[1]} x {best[2]}\n{file['device']}"
                panels.append(Gains(title, found[best]))
    return panels


def _of_weights(records: Sequence[QualityRecord]) -> list[QualityRecord]:
    return [record for record in records if not record.kv_cache]


def _scatter(axes: Any, points: Sequence[tuple[float, QualityRecord]]) -> None:
    for index, (x, record) in enumerate(points):
        axes.scatter(x, record.perplexity, color=f"C{index % 10}")
        axes.annotate(record.configuration, (x, record.perplexity), xytext=(5, 4), textcoords="offset points",
                      fontsize=8)  # fmt: skip
    axes.set(ylabel="perplexity")
    axes.margins(0.2)
    axes.grid(True, alpha=0.3)


def _figure(panels: int) -> Any:
    require("matplotlib.figure", "flashkernel plot")
    return new_figure("flashkernel plot", layout="constrained", figsize=(7 * min(panels, 3) if panels > 1 else 8, 5))


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
