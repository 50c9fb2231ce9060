"""The declaration of RMSNorm and LayerNorm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from flashkernel.core import backends
from flashkernel.core.declare import declare
from flashkernel.core.op import Call, Case, Cost, Input, Op, count, normal
from flashkernel.core.random_case import Rng
from flashkernel.core.shapes import MODELS
from flashkernel.ops.norm.configs import MAX_WIDTH

_PACKAGE = "flashkernel.ops.norm"


def _width(call: Call) -> str | None:
    width = call.facts["width"]
    return None if 0 < width <= MAX_WIDTH else f"rows must have 1 to {MAX_WIDTH} columns, not {width}"


_INPUTS = {
    "x": Input(("*rows", "width"), draw=normal(1.0, 0.5)),
    "weight": Input(("width",), draw=normal(0.5, 1.0), optional=True),
    "bias": Input(("width",), optional=True),
    "residual": Input(("*rows", "width"), optional=True),
}
_CASES = (
    Case("plain", {"rows": 5, "width": 64}),
    Case("weight", {"rows": 7, "width": 96}, present=("weight",)),
    Case("weight-bias", {"rows": (2, 3), "width": 100}, present=("weight", "bias")),
    Case("residual", {"rows": (3, 2), "width": 128}, present=("weight", "residual")),
    Case("everything", {"rows": 9, "width": 33}, present=("weight", "bias", "residual")),
    Case("one-column", {"rows": 4, "width": 1}, present=("weight",), gradients=False),
    Case("one-row", {"rows": (), "width": 257}, present=("weight", "bias")),
    Case("padded-rows", {"rows": (2, 4), "width": 40}, present=("weight", "residual"), layout="padded"),
    Case("transposed", {"rows": (3, 4), "width": 48}, present=("weight",), layout="transposed"),
    Case("float32-weight", {"rows": 6, "width": 72}, present=("weight", "bias"),
         dtypes=(torch.float16, torch.bfloat16), dtype_of={"weight": torch.float32, "bias": torch.float32}),
    Case("no-rows", {"rows": (0, 3), "width": 16}, present=("weight", "bias", "residual")),
    Case("wide", {"rows": 3, "width": 5000}, present=("weight",)),
    # Programs take many tiles each; of more rows, torch's own sum of dweight is too coarse on a machine of one core.
    Case("many-rows", {"rows": 500, "width": 32}, present=("weight", "bias")),
)  # fmt: skip


def _benches() -> tuple[Case, ...]:
    half = (torch.bfloat16,)
    grid = [
        Case(f"{rows}x{width}", {"rows": rows, "width": width}, present=("weight",), dtypes=half,
             check_axes={"rows": min(rows, (1 << 28) // width)})
        for width in (1024, 4096, 16384)
        for rows in (1024, 16384, 131072)
    ]  # fmt: skip
    decode = [
        Case(
            f"decode-{rows}x{width}", {"rows": rows, "width": width}, present=("weight",), dtypes=half, gradients=False
        )
        for width in (MODELS["llama-3.1-8b"].hidden,)
        for rows in (1, 16, 64)
    ]
    fused = Case("residual-16384x4096", {"rows": 16384, "width": 4096}, present=("weight", "residual"), dtypes=half)
    return (*grid, fused, *decode)


def _cost(case: Case, dtype: torch.dtype) -> Mapping[str, Cost]:
    """Every activation is read or written once; weights and statistics are small change, counted too."""
    rows, width = count(case.axes["rows"]), case.axes["width"]
    vectors = sum(name in case.present for name in ("weight", "bias")) * width * dtype.itemsize
    activation = rows * width * dtype.itemsize
    residual = "residual" in case.present
    return {
        "fwd": Cost(4.0 * rows * width, activation * (4 if residual else 2) + vectors),
        "bwd": Cost(10.0 * rows * width, activation * (4 if residual else 3) + 2 * vectors),
    }


def _random_case(rng: Rng, case: Case) -> Case:
    """The gradient of a wider weight starts from x + residual as rounded to x's dtype: more than its own roundings."""
    return replace(case, dtype_of={}) if "residual" in case.present else case


def _norm(name: str, summary: str, cases: tuple[Case, ...]) -> Op:
    return declare(
        _PACKAGE,
        name,
        summary,
        inputs=_INPUTS,
        kernels=(backends.triton(f"{_PACKAGE}.triton", _width),),
        cases=cases,
        benches=_benches(),
        cost=_cost,
        ranges={"rows": (0, 9, 1), "width": (2, 300, 1)},
        random_case=_random_case,
        baselines=("eager", "compile", "liger"),
    )


RMS_NORM = _norm(
    "rms_norm",
    "root-mean-square normalization, with residual add",
    (*_CASES, Case("offset", {"rows": 4, "width": 80}, {"offset": 1.0, "eps": 1e-3}, present=("weight",))),
)
LAYER_NORM = _norm("layer_norm", "layer normalization, with residual add", _CASES)
OPS = (RMS_NORM, LAYER_NORM)
