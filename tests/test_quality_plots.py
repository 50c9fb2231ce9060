"""Charts of perplexity against speed: gains of the engine and of single products, and what `flashkernel plot` draws."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_cli import run

from flashkernel.lab import quality_plots, results
from flashkernel.lab.plot import PlotError
from flashkernel.lab.quality import QualityRecord
from flashkernel.lab.results import GenerationRecord, Record

QUALITY = [
    QualityRecord("tiny", name, "", format, -1, bits, perplexity, 100, 50, kv_cache=cache)
    for name, format, bits, perplexity, cache in (
        ("bfloat16", "bfloat16", 16.0, 17.0, ""), ("int4-rtn", "int4", 4.25, 24.0, ""),
        ("int4-gptq", "int4", 4.25, 19.0, ""), ("kv-int8", "bfloat16", 16.0, 17.1, "int8"),
    )
]  # fmt: skip


def _generated(model: str, speed: float, batch: int = 1, **options: Any) -> GenerationRecord:
    return GenerationRecord(model, "engine", "backend", "bfloat16", batch, 8, 4, True, ms_per_token=1.0,
                            tokens_per_s=speed, **options)  # fmt: skip


def _product(case: str, layout: str, rows: int, columns: int, name: str, ms: float) -> Record:
    axes = {"rows": rows, "inner": 4096, "columns": columns, "layout": layout}
    kind = "baseline" if name in ("cublas", "marlin") else "backend"
    return Record("quantized_linear", case, axes, "bfloat16", "fwd", name, kind, True, dict.fromkeys(
        results.STATISTICS, ms))  # fmt: skip


def _file(*records: Any) -> dict[str, Any]:
    return {"device": "some GPU", "versions": {}, "commit": "abc", "date": "2026-01-01", "command": "flashkernel",
            "ceilings": {}, "records": list(records)}  # fmt: skip


ENGINE = _file(
    _generated("tiny-1b", 100.0), _generated("tiny-1b", 260.0, quantization="int4"),
    _generated("tiny-1b", 900.0, quantization="int4", kv_cache_dtype="int8"),  # another cache: not the weights' gain
    _generated("tiny-1b", 300.0, batch=64),  # nothing quantized beside it
    _generated("other", 10.0), _generated("other", 20.0, quantization="int8"),
)  # fmt: skip
PRODUCTS = _file(
    *(_product("w4-1", "int4_tiles group", 1, 8192, name, ms)
      for name, ms in (("hopper", 1.0), ("torch", 9.0), ("cublas", 3.0), ("marlin", 0.5))),
    *(_product("fp8-1", "fp8 row", 1, 8192, name, ms) for name, ms in (("triton", 2.0), ("cublas", 3.0))),
    *(_product("w8a8", "int8 row x:int8", 1, 8192, name, ms) for name, ms in (("triton", 1.0), ("cublas", 3.0))),
    *(_product("w4-1-wide", "int4 group", 1, 16384, name, ms) for name, ms in (("hopper", 1.0), ("cublas", 9.0))),
    _product("w4-16", "int4 group", 16, 8192, "hopper", 1.0),  # without cuBLAS
)  # fmt: skip


def test_gains_are_of_the_weights_alone() -> None:
    files = {"h200/e2e": ENGINE, "h200/quantized_linear": PRODUCTS}
    (engine,) = quality_plots.gains_of_engines(files, QUALITY)
    assert engine.title == "engine, tiny-1b, batch 1\nsome GPU", "the model that has perplexities"
    assert engine.by_format == {"int4": 2.6}
    (product,) = quality_plots.gains_of_products(files)
    assert product.title == "product of 1 row, 4096 x 8192\nsome GPU", "the one with the most formats"
    assert product.by_format == {"int4": 3.0, "fp8": 1.5}


def test_plot_draws_perplexity_against_speed_where_there_is_both(tmp_path: Path) -> None:
    quality_file = {"versions": {}, "commit": "abc", "date": "2026-01-01", "command": "", "records": [
        vars(record) for record in QUALITY]}  # fmt: skip
    (tmp_path / results.QUALITY).write_text(json.dumps(quality_file))
    results.write(tmp_path / "gpu" / "quantized_linear.json", PRODUCTS)
    shown = run("plot", str(tmp_path), "--out", str(tmp_path / "charts")).stdout
    for name in ("quality.png", "quality_speed.png"):
        assert (tmp_path / "charts" / name).read_bytes().startswith(b"\x89PNG")
        assert name in shown
    with pytest.raises(PlotError, match="no file has both"):
        quality_plots.plot_quality_against_speed(QUALITY, {"e2e": _file(_generated("tiny", 1.0))}, tmp_path / "x.png")
