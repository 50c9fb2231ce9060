"""The declaration of quantization to 8 bits: alone, after RMSNorm, and after a gated activation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks.epilogue import GATES
from flashkernel.blocks.weight import group_shape_of
from flashkernel.core import backends
from flashkernel.core.declare import Workload, declare
from flashkernel.core.op import Axes, Call, Case, Cost, Input, Op, Tolerance, count, normal
from flashkernel.core.random_case import Rng
from flashkernel.core.shapes import MODELS
from flashkernel.core.tune import power_of_2
from flashkernel.ops.quant.configs import MAX_WIDTH

_PACKAGE = "flashkernel.ops.quant"
_HALF = (torch.bfloat16,)
_E4M3, _E5M2, _INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
_HIDDEN, _INNER = MODELS["llama-3.1-8b"].hidden, MODELS["llama-3.1-8b"].intermediate


def _codes(call: Call) -> str | None:
    if call.facts["code"] not in (_E4M3, _INT8):
        return f"its kernels have codes of float8_e4m3fn and int8, not of {str(call.facts['code']).split('.')[-1]}"
    return None


def _columns(call: Call) -> str | None:
    """Whole groups are in registers."""
    group, width = call.facts["group"], call.facts["width"]
    columns = width if group[1] == -1 else group[1]
    if columns > MAX_WIDTH and group != (-1, -1):
        return f"up to {MAX_WIDTH} columns share a scale, not {columns}"
    return None


def _quantize(call: Call) -> str | None:
    if call.facts["group"] == (-1, -1) and not call.facts["symmetric"]:
        return "it has zero points for rows and groups, not for the whole tensor"
    if call.facts["group"] == (-1, -1) and call.facts["width"] > MAX_WIDTH:
        return f"rows have up to {MAX_WIDTH} columns, not {call.facts['width']}"
    return _codes(call) or _columns(call)


def _norm(call: Call) -> str | None:
    columns, width = call.facts["group"][1], call.facts["width"]
    if not 0 < width <= MAX_WIDTH:
        return f"rows must have 1 to {MAX_WIDTH} columns, not {width}"
    if columns != -1 and columns < width and columns != power_of_2(columns):
        return f"columns that share a scale are a power of two in its kernel, not {columns}"
    return _codes(call)


def _glu(call: Call) -> str | None:
    return _codes(call) or _columns(call)


def _dequantize(call: Call) -> str | None:
    if call.facts["code"] == _E4M3 and call.device.kind == "cuda" and call.device.arch < 89:
        return f"it reads 8-bit floats from sm_89 on; {call.device.name} is sm_{call.device.arch}"
    if call.facts["columns"] > MAX_WIDTH:
        return f"rows have up to {MAX_WIDTH} columns, not {call.facts['columns']}"
    return _codes(call)


class _Scale(Input):
    """Scales by the axis "scales": a granularity."""

    def shape(self, axes: Axes) -> tuple[int, ...]:
        *rows, width = super().shape(axes)
        group = group_shape_of(axes["scales"])
        if group == (-1, -1):
            return ()
        return (*rows, 1 if group[1] == -1 else -(-width // group[1]))


def _positive(most: float) -> Callable[..., Tensor]:
    def draw(shape: tuple[int, ...], axes: Axes, generator: torch.Generator) -> Tensor:
        return (torch.rand(shape, generator=generator, device=generator.device) + 0.5) * most

    return draw


def _integers(shape: tuple[int, ...], axes: Axes, generator: torch.Generator) -> Tensor:
    return (torch.randn(shape, generator=generator, device=generator.device) * 40).clamp(-120, 120).round()


def _case(name: str, rows: Any, width: int, present: tuple[str, ...] = (), **options: Any) -> Case:
    return Case(name, {"rows": rows, "width": width, "scales": "tensor"}, options, present=present)


def _static(name: str, scales: str, **options: Any) -> Case:
    """A case with given scales."""
    case = _case(name, (2, 3), 200, ("scale",), granularity=scales, **options)
    return case.at(scales=scales)


_SHAPES = (
    _case("plain", 5, 64),
    _case("odd", (2, 3), 33, dtype=_INT8),
    _case("one-row", (), 257),
    _case("one-column", 4, 1, dtype=_INT8),
    _case("group", 3, 256, granularity="group"),
    _case("group-cut-off", (2, 2), 300, granularity="group", dtype=_INT8),
    _case("group-32", 4, 96, granularity="1x32"),
    _case("group-wider-than-rows", 4, 96, granularity="group"),
    _case("e5m2", 3, 40, dtype=_E5M2),
    replace(_case("padded", (2, 4), 40, dtype=_INT8), layout="padded"),
    replace(_case("transposed", (3, 4), 136, granularity="group"), layout="transposed"),
    _case("no-rows", (0, 3), 16),
    _case("no-rows-group", 0, 256, granularity="group", dtype=_INT8),
    _case("wide", 3, 5000),
    _case("many-rows", 300, 40, dtype=_INT8),
)
_QUANTIZE_CASES = (
    *_SHAPES,
    _case("tensor", (2, 3), 50, granularity="tensor"),
    _case("tensor-int8", 7, 64, granularity="tensor", dtype=_INT8),
    _case("no-columns", 3, 0),
    _case("zeros-row", 5, 70, dtype=_INT8, symmetric=False),
    _case("zeros-group", 2, 200, dtype=_INT8, symmetric=False, granularity="group"),
    _case("zeros-tensor", 2, 20, dtype=_INT8, symmetric=False, granularity="tensor"),
    _static("static-tensor", "tensor"),
    _static("static-row", "row", dtype=_INT8),
    _static("static-group", "group"),
    _static("static-e5m2", "row", dtype=_E5M2),
)
_NORM_CASES = (
    *_SHAPES,
    _case("weight", 7, 96, ("weight",), dtype=_INT8),
    _case("residual", (3, 2), 128, ("weight", "residual")),
    _case("everything", 4, 300, ("weight", "residual"), dtype=_INT8, granularity="group", offset=1.0, eps=1e-3),
    replace(_case("float32-weight", 6, 72, ("weight",)), dtypes=(torch.float16, torch.bfloat16),
            dtype_of={"weight": torch.float32}),
)  # fmt: skip


def _glu_cases() -> tuple[Case, ...]:
    separate = [replace(case, present=("up",)) for case in _SHAPES]
    packed = [
        _case("halves", 5, 64), _case("halves-group", (2, 3), 2 * 300, granularity="group", dtype=_INT8),
        replace(_case("halves-padded", 4, 40), layout="padded"), _case("halves-no-columns", 3, 0),
        _case("interleaved", 5, 64, packed="interleaved", dtype=_INT8),
        _case("interleaved-group", 3, 2 * 200, packed="interleaved", granularity="group"),
        replace(_case("interleaved-transposed", 6, 66, packed="interleaved"), layout="transposed"),
        *[_case(kind.replace("_", "-"), 5, 66, activation=kind, dtype=_INT8) for kind in GATES],
        _case("gpt-oss-interleaved", 3, 2 * 140, activation="gpt_oss_glu", packed="interleaved", granularity="group"),
    ]  # fmt: skip
    return (*separate, *packed)


def _dequantize_cases() -> tuple[Case, ...]:
    """The dtype of a case is that of the result."""
    found = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for name, code, scales, rows, width, zeros in (
            ("e4m3-row", _E4M3, "row", 5, 64, False), ("int8-row", _INT8, "row", (2, 3), 33, True),
            ("e4m3-group", _E4M3, "group", (2, 2), 300, False), ("int8-group", _INT8, "group", 3, 256, True),
            ("int8-tensor", _INT8, "tensor", 4, 50, False), ("e5m2-row", _E5M2, "row", 3, 40, False),
            ("no-rows", _INT8, "row", (0, 3), 16, False), ("no-columns", _E4M3, "row", 3, 0, False),
        ):  # fmt: skip
            axes = {"rows": rows, "width": width, "scales": scales}
            options = {"granularity": scales, "dtype": dtype}
            found.append(
                Case(f"{name}-{str(dtype).split('.')[-1]}", axes, options, (dtype,), ("zeros",) if zeros else (),
                     dtype_of={"data": code})
            )  # fmt: skip
    layouts = [replace(found[index], name=name, layout=name) for index, name in ((2, "padded"), (1, "transposed"))]
    return (*found, *layouts)


def _random_quantize(rng: Rng, case: Case) -> Case:
    """Zero points are those of dynamic int8; given scales have the granularity's shape."""
    options = {"dtype": rng.one((_E4M3, _INT8)), "granularity": rng.one(("row", "group", "1x32", "tensor"))}
    present = case.present
    if rng.maybe(0.3):
        options |= {"dtype": _INT8, "symmetric": False, "granularity": rng.one(("row", "group"))}
        present = ()
    axes = {**case.axes, "scales": options["granularity"] if rng.maybe(0.7) else "tensor"}
    return replace(case, options=options, present=present, axes=axes, dtype_of={})


def _random_fused(rng: Rng, case: Case) -> Case:
    options = {**case.options, "dtype": rng.one((_E4M3, _INT8)), "granularity": rng.one(("row", "group", "1x32"))}
    return replace(case, options=options)


def _random_glu(rng: Rng, case: Case) -> Case:
    """One tensor that holds gate and up has an even number of columns."""
    return _random_fused(rng, case.at(width=case.axes["width"] + case.axes["width"] % 2))


def _random_dequantize(rng: Rng, case: Case) -> Case:
    scales = rng.one(("row", "group", "1x32", "tensor"))
    code = rng.one((_E4M3, _INT8))
    present = case.present if code == _INT8 else ()
    return replace(case, axes={**case.axes, "scales": scales}, options={"granularity": scales, "dtype": case.dtypes[0]},
                   present=present, dtype_of={"data": code})  # fmt: skip


def _bench(name: str, rows: int, width: int, present: tuple[str, ...] = (), **options: Any) -> Case:
    case = replace(_case(name, rows, width, present, **options), dtypes=_HALF)
    return replace(case, check_axes={"rows": min(rows, 1024)})


_QUANTIZE_BENCHES = (
    _bench(f"16384x{_HIDDEN}", 16384, _HIDDEN),
    _bench(f"16384x{_INNER}", 16384, _INNER),
    _bench(f"int8-16384x{_HIDDEN}", 16384, _HIDDEN, dtype=_INT8),
    _bench(f"group-16384x{_HIDDEN}", 16384, _HIDDEN, granularity="group"),
    _bench(f"group-16384x{_INNER}", 16384, _INNER, granularity="group"),
    _bench(f"static-16384x{_HIDDEN}", 16384, _HIDDEN, ("scale",), granularity="tensor"),
    _bench(f"zeros-16384x{_HIDDEN}", 16384, _HIDDEN, dtype=_INT8, symmetric=False),
    _bench(f"decode-16x{_HIDDEN}", 16, _HIDDEN),
)
_NORM_BENCHES = (
    _bench(f"16384x{_HIDDEN}", 16384, _HIDDEN, ("weight",)),
    _bench(f"group-16384x{_HIDDEN}", 16384, _HIDDEN, ("weight",), granularity="group"),
    _bench(f"residual-16384x{_HIDDEN}", 16384, _HIDDEN, ("weight", "residual")),
    _bench(f"int8-16384x{_HIDDEN}", 16384, _HIDDEN, ("weight",), dtype=_INT8),
    _bench(f"decode-16x{_HIDDEN}", 16, _HIDDEN, ("weight",)),
)
_GLU_BENCHES = (
    _bench(f"halves-16384x{_INNER}", 16384, 2 * _INNER),
    _bench(f"halves-group-16384x{_INNER}", 16384, 2 * _INNER, granularity="group"),
    _bench(f"separate-group-16384x{_INNER}", 16384, _INNER, ("up",), granularity="group"),
    _bench("interleaved-group-16384x2880", 16384, 2 * 2880, activation="gpt_oss_glu", packed="interleaved",
           granularity="group"),
    _bench(f"decode-16x{_INNER}", 16, 2 * _INNER),
)  # fmt: skip
_DEQUANTIZE_BENCHES = tuple(
    replace(_bench(name, 16384, _HIDDEN, granularity=scales, dtype=torch.bfloat16), dtype_of={"data": code},
            axes={"rows": 16384, "width": _HIDDEN, "scales": scales})
    for name, code, scales in (
        (f"16384x{_HIDDEN}", _E4M3, "row"), (f"group-16384x{_HIDDEN}", _E4M3, "group"),
        (f"int8-16384x{_HIDDEN}", _INT8, "row"),
    )
)  # fmt: skip


def _cost(case: Case, dtype: torch.dtype) -> Mapping[str, Cost]:
    """Every input is read once; codes, scales and the sum with a residual are written once."""
    rows, width = count(case.axes["rows"]), case.axes["width"]
    activations = 3 if "residual" in case.present else 1  # of which one is the sum
    return {"fwd": Cost(6.0 * rows * width, activations * rows * width * dtype.itemsize + _written(case, width))}


def _glu_cost(case: Case, dtype: torch.dtype) -> Mapping[str, Cost]:
    """Gate and up are read once, in one tensor or in two; codes and scales are written once."""
    rows, width = count(case.axes["rows"]), case.axes["width"] // (1 if "up" in case.present else 2)
    return {"fwd": Cost(10.0 * rows * width, 2 * rows * width * dtype.itemsize + _written(case, width))}


def _written(case: Case, width: int) -> int:
    """Bytes of codes and scales."""
    columns = group_shape_of(case.options.get("granularity", "row"))[1]
    return count(case.axes["rows"]) * (width + 4 * (1 if columns == -1 else -(-width // columns)))


def _dequantize_cost(case: Case, dtype: torch.dtype) -> Mapping[str, Cost]:
    """Codes are read once and values written once."""
    elements = count(case.axes["rows"]) * case.axes["width"]
    return {"fwd": Cost(1.0 * elements, elements * (1 + dtype.itemsize))}


def _declare(
    name: str, summary: str, supports: Callable[[Call], str | None], width: tuple[int, int, int] = (1, 300, 1),
    **fields: Any,
) -> Op:  # fmt: skip
    return declare(
        _PACKAGE, name, summary, kernels=(backends.triton(f"{_PACKAGE}.triton", supports),),
        baselines=("eager", "compile"), ranges={"rows": (0, 6, 1), "width": width}, backward=None,
        differentiable=False, **fields,
    )  # fmt: skip


# A norm or a gate is off by a rounding of float32, and its code then by one: in e4m3 by 32 of 448.
_FUSED = Tolerance(floor=0.6, floor32=4.0, integer_steps=1)

QUANTIZE = _declare(
    "quantize",
    "x in 8 bits and its scales, static or dynamic",
    _quantize,
    function=f"{_PACKAGE}.named:quantize",
    reference=f"{_PACKAGE}.named:reference",
    inputs={
        "x": Input(("*rows", "width"), draw=normal(1.0, 0.2)),
        "scale": _Scale(("*rows", "width"), dtype=torch.float32, draw=_positive(0.01), optional=True),
    },
    workload=Workload(_QUANTIZE_CASES, _QUANTIZE_BENCHES, _cost),
    # torch.compile contracts to fma, and is timed beside us; tests/test_quant.py wants equal codes of our backends.
    tolerance=Tolerance(integer_steps=1),
    random_case=_random_quantize,
)
DEQUANTIZE = _declare(
    "dequantize",
    "(data - zeros) * scales",
    _dequantize,
    inputs={
        "data": Input(("*rows", "width"), dtype=_INT8, draw=_integers),
        "scales": _Scale(("*rows", "width"), dtype=torch.float32, draw=_positive(0.002)),
        "zeros": _Scale(("*rows", "width"), dtype=_INT8, draw=_integers, optional=True),
    },
    workload=Workload(_dequantize_cases(), _DEQUANTIZE_BENCHES, _dequantize_cost),
    random_case=_random_dequantize,
)
RMS_NORM_QUANTIZE = _declare(
    "rms_norm_quantize",
    "RMSNorm, with residual add, and its quantization to 8 bits in one pass",
    _norm,
    inputs={
        "x": Input(("*rows", "width"), draw=normal(1.0, 0.5)),
        "weight": Input(("width",), draw=normal(0.5, 1.0), optional=True),
        "residual": Input(("*rows", "width"), optional=True),
    },
    workload=Workload(_NORM_CASES, _NORM_BENCHES, _cost),
    tolerance=_FUSED,
    width=(2, 300, 1),
    random_case=_random_fused,
)
GLU_QUANTIZE = _declare(
    "glu_quantize",
    "gated activation and its quantization to 8 bits in one pass",
    _glu,
    inputs={
        "gate": Input(("*rows", "width"), draw=normal(2.0)),
        "up": Input(("*rows", "width"), draw=normal(2.0), optional=True),
    },
    workload=Workload(_glu_cases(), _GLU_BENCHES, _glu_cost),
    tolerance=_FUSED,
    width=(2, 300, 2),
    random_case=_random_glu,
)
OPS = (QUANTIZE, DEQUANTIZE, RMS_NORM_QUANTIZE, GLU_QUANTIZE)
