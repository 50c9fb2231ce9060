"""The declaration of the activations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from flashkernel.core import backends
from flashkernel.core.declare import declare
from flashkernel.core.op import Case, Cost, Draw, Input, Op, Tolerance, count, normal
from flashkernel.core.random_case import Rng
from flashkernel.core.shapes import MODELS

_PACKAGE = "flashkernel.ops.activation"
_HALF = (torch.bfloat16,)

_ELEMENTWISE_CASES = (
    Case("plain", {"rows": 5, "columns": 64}),
    Case("leading-dims", {"rows": (2, 3, 2), "columns": 17}),
    Case("several-blocks", {"rows": 3, "columns": 1100}),
    Case("one-element", {"rows": (), "columns": 1}),
    Case("padded-rows", {"rows": (2, 4), "columns": 40}, layout="padded"),
    Case("transposed", {"rows": (3, 4), "columns": 48}, layout="transposed"),
    Case("transposed-matrix", {"rows": 6, "columns": 20}, layout="transposed"),
    Case("no-rows", {"rows": (0, 3), "columns": 16}),
    Case("no-columns", {"rows": 3, "columns": 0}),
)
_SEPARATE_CASES = tuple(replace(case, present=("up",)) for case in _ELEMENTWISE_CASES)


def _packed_cases(packed: str) -> tuple[Case, ...]:
    """Packed inputs have two columns for each of the output."""
    options = {"packed": packed}
    return (
        Case(packed, {"rows": 5, "columns": 64}, options),
        Case(f"{packed}-odd-width", {"rows": (2, 3), "columns": 2 * 33}, options),
        Case(f"{packed}-several-blocks", {"rows": 2, "columns": 2 * 1100}, options),
        Case(f"{packed}-one-element", {"rows": (), "columns": 2}, options),
        Case(f"{packed}-padded-rows", {"rows": (2, 4), "columns": 40}, options, layout="padded"),
        Case(f"{packed}-transposed", {"rows": (3, 4), "columns": 48}, options, layout="transposed"),
        Case(f"{packed}-no-rows", {"rows": (0, 3), "columns": 16}, options),
        Case(f"{packed}-no-columns", {"rows": 3, "columns": 0}, options),
    )


def _bench(rows: int, width: int, packed: str | None = None) -> Case:
    columns = width if packed is None else 2 * width
    return Case(
        f"{rows}x{width}" if packed is None else f"{packed}-{rows}x{width}",
        {"rows": rows, "columns": columns},
        {} if packed is None else {"packed": packed},
        dtypes=_HALF,
        present=("up",) if packed is None else (),
        gradients=rows > 64,  # fewer are decode sizes
    )


_LLAMA_1B, _LLAMA_8B = MODELS["llama-3.2-1b"].intermediate, MODELS["llama-3.1-8b"].intermediate
_GPT_OSS = MODELS["gpt-oss-20b"].intermediate
_DECODE = tuple(_bench(rows, _LLAMA_8B) for rows in (1, 16, 64))
_GATED_BENCHES = (_bench(16384, _LLAMA_8B), _bench(16384, _LLAMA_1B))
_HALVES_BENCHES = (_bench(16384, _LLAMA_8B, "halves"), _bench(16, _LLAMA_8B, "halves"))
_INTERLEAVED_BENCHES = (_bench(16384, _GPT_OSS, "interleaved"), _bench(16, _GPT_OSS, "interleaved"))
_ELEMENTWISE_BENCHES = tuple(
    replace(case, present=())
    for case in (_bench(16384, 4 * MODELS["gpt2"].hidden), _bench(16384, _LLAMA_8B), _DECODE[1])
)


def _cost(case: Case, dtype: torch.dtype) -> Mapping[str, Cost]:
    """Everything is read once and written once; the backward reads the inputs again and writes as many gradients."""
    given = count(case.axes["rows"]) * case.axes["columns"] * (2 if "up" in case.present else 1)
    gated = "up" in case.present or "packed" in case.options
    made = given // 2 if gated else given
    return {
        "fwd": Cost(10.0 * made, (given + made) * dtype.itemsize),
        "bwd": Cost(20.0 * made, (2 * given + made) * dtype.itemsize),
    }


def _odd_columns(rng: Rng, case: Case) -> Case:
    """Packed inputs have two columns for each of the output, as the ranges have it; others may have an odd number."""
    return case.at(columns=max(1, case.axes["columns"] - rng.call.randrange(2)))


def _odd_where_separate(rng: Rng, case: Case) -> Case:
    return _odd_columns(rng, case) if "up" in case.present else case


def _op(
    name: str,
    summary: str,
    inputs: Mapping[str, Input],
    cases: tuple[Case, ...],
    benches: tuple[Case, ...],
    peers: tuple[str, ...] = ("eager", "compile"),
) -> Op:
    return declare(
        _PACKAGE,
        name,
        summary,
        inputs=inputs,
        kernels=(backends.triton(f"{_PACKAGE}.triton"),),
        cases=cases,
        benches=benches,
        cost=_cost,
        tolerance=Tolerance(floor32=4.0),
        ranges={"rows": (0, 6, 1), "columns": (2, 200, 2)},
        random_case=_odd_where_separate if "up" in inputs else _odd_columns,
        baselines=peers,
    )


def _with(cases: tuple[Case, ...], prefix: str, **options: object) -> tuple[Case, ...]:
    return tuple(replace(case, name=f"{prefix}-{case.name}", options={**case.options, **options}) for case in cases)


def _elementwise(draw: Draw) -> dict[str, Input]:
    return {"x": Input(("*rows", "columns"), draw=draw)}


def _gated(draw: Draw) -> dict[str, Input]:
    return {
        "gate": Input(("*rows", "columns"), draw=draw),
        "up": Input(("*rows", "columns"), draw=draw, optional=True),
    }


_ALL_PACKED = (*_packed_cases("halves"), *_packed_cases("interleaved"))
_TWO_PACKED = (_packed_cases("halves")[1], _packed_cases("interleaved")[1])

GELU = _op(
    "gelu",
    "Gaussian error linear unit, exact or by tanh",
    _elementwise(normal(2.0)),
    (*_ELEMENTWISE_CASES, *_with(_ELEMENTWISE_CASES[:3], "tanh", approximate="tanh")),
    (*_ELEMENTWISE_BENCHES, *_with(_ELEMENTWISE_BENCHES[1:2], "tanh", approximate="tanh")),
)
SILU = _op("silu", "x sigmoid(x)", _elementwise(normal(2.0)), _ELEMENTWISE_CASES, _ELEMENTWISE_BENCHES[1:])
RELU = _op("relu", "max(x, 0)", _elementwise(normal()), _ELEMENTWISE_CASES, _ELEMENTWISE_BENCHES[1:2])
SQUARED_RELU = _op("squared_relu", "max(x, 0)^2", _elementwise(normal()), _ELEMENTWISE_CASES, _ELEMENTWISE_BENCHES[1:2])
SWIGLU = _op(
    "swiglu",
    "silu(gate) up, packed or separate",
    _gated(normal(2.0)),
    (*_SEPARATE_CASES, *_ALL_PACKED),
    (*_GATED_BENCHES, *_HALVES_BENCHES, *_INTERLEAVED_BENCHES, *_DECODE),
    ("eager", "compile", "liger"),
)
GEGLU = _op(
    "geglu",
    "gelu(gate) up, packed or separate",
    _gated(normal(2.0)),
    (*_SEPARATE_CASES, *_TWO_PACKED, *_with((_SEPARATE_CASES[1], *_TWO_PACKED), "exact", approximate="none")),
    (*_GATED_BENCHES, _HALVES_BENCHES[0], *_with(_GATED_BENCHES[:1], "exact", approximate="none"), *_DECODE),
    ("eager", "compile", "liger"),
)
REGLU = _op(
    "reglu",
    "relu(gate) up, packed or separate",
    _gated(normal()),
    (*_SEPARATE_CASES, *_TWO_PACKED),
    _GATED_BENCHES[:1],
)
GPT_OSS_GLU = _op(
    "gpt_oss_glu",
    "gpt-oss's clamped gate, packed or separate",
    _gated(normal(4.0)),  # wide enough to meet both clamps
    (*_SEPARATE_CASES[:3], *_ALL_PACKED, *_with(_TWO_PACKED, "other-clamp", alpha=1.0, limit=2.0)),
    (_bench(16384, _GPT_OSS), *_INTERLEAVED_BENCHES),
)
OPS = (GELU, SILU, RELU, SQUARED_RELU, SWIGLU, GEGLU, REGLU, GPT_OSS_GLU)
