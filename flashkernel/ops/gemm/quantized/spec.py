"""The declaration of linear layers by the tensors of a quantized weight, which `linear` computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks.fp8 import FP8
from flashkernel.blocks.weight import Layout
from flashkernel.core.op import Axes, Backend, Baseline, Case, Cost, Input, Op, count
from flashkernel.core.random_case import Rng

_PACKAGE = "flashkernel.ops.gemm"
_HALF = (torch.bfloat16,)
_BENCHED = ((4096, 6144), (4096, 28672), (14336, 4096))  # inner x columns: Llama-3.1-8B's qkv, gate and up, down
_ROWS = (1, 16, 64, 256, 4096)


def _data(shape: tuple[int, ...], axes: Axes, generator: torch.Generator) -> Tensor:
    """Any byte is two 4-bit values or one of 8 bits; floats are drawn as such."""
    if axes["floats"]:
        return torch.randn(shape, generator=generator, device=generator.device)
    return torch.randint(0, 256, shape, generator=generator, device=generator.device).to(torch.uint8)


def _scales(shape: tuple[int, ...], axes: Axes, generator: torch.Generator) -> Tensor:
    """Such that weights have a standard deviation near 0.02."""
    if axes["exponents"]:
        return torch.randint(118, 122, shape, generator=generator, device=generator.device)
    steps = torch.rand(shape, generator=generator, device=generator.device) + 0.5
    return steps * 2.0 ** -(10 if axes["columns_per_byte"] == 1 and not axes["floats"] else 6)


def _zeros(shape: tuple[int, ...], axes: Axes, generator: torch.Generator) -> Tensor:
    """Zero points near the middle of the 4-bit codes."""
    return torch.randint(6, 11, shape, generator=generator, device=generator.device)


class _Stored(Input):
    """(columns, inner), two columns to a byte in formats of four bits."""

    def shape(self, axes: Axes) -> tuple[int, ...]:
        return axes["columns"], axes["inner"] // axes["columns_per_byte"]


class _OfGroups(Input):
    """(columns, groups)."""

    def shape(self, axes: Axes) -> tuple[int, ...]:
        group = Layout.parse(axes["layout"]).group_shape[1]
        return axes["columns"], 1 if group == -1 else axes["inner"] // group


_INPUTS = {
    "x": Input(("*rows", "inner")),
    "data": _Stored((), draw=_data, grad=False),
    "scales": _OfGroups((), draw=_scales, grad=False),
    "zeros": _OfGroups((), dtype=torch.uint8, draw=_zeros, grad=False, optional=True),
    "bias": Input(("columns",), optional=True),
}


def _case(name: str, weight: str, axes: Axes, present: tuple[str, ...] = (), **more: Any) -> Case:
    parsed = Layout.parse(weight)
    base = parsed.format.partition("_")[0]
    eight = base in ("int8", "fp8")
    data = {"fp8": FP8, "int8": torch.int8}.get(base, torch.uint8)
    scales = torch.uint8 if base == "mxfp4" else torch.float16 if parsed.format.endswith("_tiles") else torch.float32
    facts = {
        "columns_per_byte": 1 if eight else 2, "floats": base == "fp8", "exponents": base == "mxfp4", "layout": weight
    }  # fmt: skip
    dtype_of = {"data": data, "scales": scales, **({"zeros": data} if parsed.zeros else {})}
    return Case(name, {**axes, **facts}, {"layout": weight}, present=(*present, *(("zeros",) if parsed.zeros else ())),
                dtype_of=dtype_of, **more)  # fmt: skip


_CASES = (
    _case("int4", "int4 1x32", {"rows": (2, 3), "columns": 40, "inner": 64}, ("bias",)),
    _case("int4-zeros-many-rows", "int4 row zeros", {"rows": 70, "columns": 24, "inner": 96}),
    _case("int4-tiles", "int4_tiles 1x64", {"rows": 17, "columns": 128, "inner": 128}, ("bias",)),
    _case("int4-tiles-zeros", "int4_tiles row zeros", {"rows": 3, "columns": 64, "inner": 192}),
    _case("int8-tiles", "int8_tiles 1x32", {"rows": 130, "columns": 64, "inner": 64}),
    _case("mxfp4-tiles", "mxfp4_tiles 1x32", {"rows": 1, "columns": 192, "inner": 64}, ("bias",)),
    _case("mxfp4", "mxfp4 1x32", {"rows": 0, "columns": 8, "inner": 32}),
    _case("padded", "int4 1x32 zeros", {"rows": 5, "columns": 21, "inner": 64}, ("bias",), layout="padded"),
    _case("transposed", "int8 row", {"rows": 3, "columns": 16, "inner": 33}, layout="transposed"),
    _case("tiles-transposed", "int4_tiles 1x32", {"rows": 3, "columns": 64, "inner": 128}, layout="transposed"),
)


_RANDOM_LAYOUTS = (
    "int4 1x32", "int4 1x64 zeros", "int4 row", "int4 row zeros", "int8 row", "int8 1x32 zeros", "mxfp4 1x32",
    "int4_tiles 1x32 zeros", "int4_tiles 1x128", "int4_tiles row", "int8_tiles 1x64", "int8_tiles row",
    "mxfp4_tiles 1x32",
)  # fmt: skip


def _random_case(rng: Rng, case: Case) -> Case:
    """Sizes that the layout's groups and tiles divide."""
    layout = rng.one(_RANDOM_LAYOUTS)
    parsed = Layout.parse(layout)
    tiles, group = parsed.format.endswith("_tiles"), max(parsed.group_shape[1], 2)
    step, most = max(group, 64) if tiles else group, 1024 if rng.large else 160
    axes = {
        "rows": tuple(rng.size(1, 600 if rng.large else 70) for _ in range(rng.call.randint(0, 1))),
        "columns": 64 * rng.call.randint(1, most // 64) if tiles else rng.size(1, most),
        "inner": step * rng.call.randint(1, max(1, most // step)),
    }
    present = tuple(name for name in case.present if name == "bias")
    made = _case(case.name, layout, axes, present, dtypes=case.dtypes)
    return replace(made, gradients=case.gradients)


def _benches() -> tuple[Case, ...]:
    made = []
    for inner, columns in _BENCHED:
        for rows in _ROWS:
            axes = {"rows": rows, "columns": columns, "inner": inner}
            small = {"rows": min(rows, 512), "columns": 512, "inner": 512}
            for name, layout in (("w4a16", "int4_tiles group"), ("fp8", "fp8 row x:float8_e4m3fn")):
                made.append(
                    _case(f"{name}-{inner}x{columns}-{rows}", layout, axes, dtypes=_HALF, gradients=False,
                          check_axes=small)
                )  # fmt: skip
    axes = {"rows": 16, "columns": 28672, "inner": 4096}
    small = {"columns": 512, "inner": 512}
    others = (("mxfp4", "mxfp4_tiles 1x32"), ("w8a16", "int8_tiles row"), ("w4a16-rows", "int4 group"))
    many = {**axes, "rows": 4096}
    in_fp8 = _case("mxfp4-fp8-4096x28672-4096", "mxfp4 1x32 x:float8_e4m3fn", many, dtypes=_HALF, gradients=False,
                   check_axes={**small, "rows": 512})  # fmt: skip
    return (*made, *(_case(f"{name}-4096x28672-16", layout, axes, dtypes=_HALF, gradients=False, check_axes=small)
                     for name, layout in others), in_fp8)  # fmt: skip


def _cost(case: Case, dtype: torch.dtype) -> Mapping[str, Cost]:
    """The stored weight is read once; x and the output as well."""
    rows, inner, columns = count(case.axes["rows"]), case.axes["inner"], case.axes["columns"]
    stored = columns * inner // case.axes["columns_per_byte"]
    product, moved = 2.0 * rows * inner * columns, stored + rows * (inner + columns) * dtype.itemsize
    return {"fwd": Cost(product, moved), "bwd": Cost(product, moved)}


def quantized_linear(backends: tuple[Backend, ...]) -> Op:
    """The operator, with the backends of `linear`."""
    return Op(
        name="quantized_linear",
        backward=None,
        summary="linear layer by the tensors of a quantized weight",
        function=f"{_PACKAGE}.api:quantized_linear",
        reference=f"{_PACKAGE}.reference:quantized_linear",
        inputs=_INPUTS,
        backends=backends,
        cases=_CASES,
        benches=_benches(),
        random_case=_random_case,
        cost=_cost,
        sum_length=lambda case: case.axes["inner"],
        baselines=tuple(
            Baseline(name, f"{_PACKAGE}.quantized.baselines:{name}", forward_only=True)
            for name in ("cublas", "marlin", "machete", "cutlass_fp8")
        ),
    )
