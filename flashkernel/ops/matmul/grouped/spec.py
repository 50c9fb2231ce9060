"""The declaration of the grouped product."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks.epilogue import GATES, Gate
from flashkernel.blocks.fp8 import FP8
from flashkernel.blocks.gate_up import PACKINGS
from flashkernel.core import backends
from flashkernel.core.declare import Workload, declare
from flashkernel.core.op import COLUMNS, FLOATS, Axes, Baseline, Call, Case, Cost, Input, integers, normal
from flashkernel.core.random_case import Rng
from flashkernel.core.shapes import MODELS

_PACKAGE = "flashkernel.ops.matmul.grouped"
_HALF = (torch.bfloat16,)


def eight_bit_gradients(call: Call) -> str | None:
    """Why kernels do not take a call of 8-bit operands, or None."""
    return "products of 8-bit operands are forward only" if call.gradients and call.dtype not in FLOATS else None


def triton_operands(call: Call) -> str | None:
    """The same of Triton's kernels, whose FP8 products need tensor cores for FP8."""
    if call.dtype == FP8 and call.device.kind == "cuda" and call.device.arch < 89:
        return f"FP8 products need sm_89 or newer; {call.device.name} is sm_{call.device.arch}"
    return eight_bit_gradients(call)


def _offsets(shape: tuple[int, ...], axes: Axes, generator: torch.Generator) -> Tensor:
    """Offsets of groups: "empty" of the first are empty, and the last "tail" rows are in no group.

    Sizes are "random" (bounds drawn uniformly), "even", or "zipf": in proportion to 1 / rank, in a random order, as
    tokens divide among experts without a loss that balances them.
    """
    last = max(0, axes["rows"] - axes["tail"])
    if axes["sizes"] == "random":
        inner = torch.randint(0, last + 1, shape, generator=generator, device=generator.device)
    else:
        rank = torch.rand(shape[0] - 1, generator=generator, device=generator.device).argsort() + 1
        share = 1.0 / rank.double() if axes["sizes"] == "zipf" else torch.ones_like(rank, dtype=torch.float64)
        inner = (torch.nn.functional.pad(share.cumsum(0), (1, 0)) / share.sum() * last).round().long()
    inner[1 : 1 + axes["empty"]] = 0
    inner[-1:] = last
    inner[:1] = 0
    return inner.sort().values.to(torch.int32)


def _permutation(shape: tuple[int, ...], axes: Axes, generator: torch.Generator) -> Tensor:
    rows = axes["rows"] if axes["out_rows"] is None else axes["out_rows"]
    order = torch.rand(rows, generator=generator, device=generator.device).argsort()
    return order[: shape[0]].to(torch.int32)


def _positive(shape: tuple[int, ...], axes: Axes, generator: torch.Generator) -> Tensor:
    return 0.5 + torch.rand(shape, generator=generator, device=generator.device)


class _Rows(Input):
    """Rows of x: as many as there are rows, or as an axis "tokens" says where they are gathered."""

    def shape(self, axes: Axes) -> tuple[int, ...]:
        return (axes["tokens"] if axes["tokens"] is not None else axes["rows"], axes["k"])


class _Offsets(Input):
    """One more than there are groups."""

    def shape(self, axes: Axes) -> tuple[int, ...]:
        return (axes["groups"] + 1,)


_INPUTS = {
    "x": _Rows(("rows", "k")),
    "weights": Input(("groups", "k", "n"), draw=normal(0.1)),
    "group_offsets": _Offsets(("groups",), torch.int32, _offsets, grad=False),
    "gather": Input(("rows",), torch.int32, integers("tokens"), grad=False, optional=True),
    "scatter": Input(("rows",), torch.int32, _permutation, grad=False, optional=True),
    "row_weights": Input(("rows",), torch.float32, optional=True),
    "bias": Input(("groups", "n"), optional=True),
    "x_scale": Input(("*x_scales",), torch.float32, _positive, grad=False, optional=True),
    "weight_scale": Input(("*weight_scales",), torch.float32, _positive, grad=False, optional=True),
}


def _groups(
    rows: int, groups: int, n: int, k: int, *, tokens: int | None = None, out_rows: int | None = None, empty: int = 1,
    tail: int = 0, sizes: str = "random",
) -> dict[str, Any]:  # fmt: skip
    return {
        "rows": rows, "groups": groups, "n": n, "k": k, "tokens": tokens, "out_rows": out_rows, "empty": empty,
        "tail": tail, "sizes": sizes, "x_scales": (), "weight_scales": (),
    }  # fmt: skip


def _scale_axes(axes: Mapping[str, Any], kind: str) -> dict[str, tuple[int, ...]]:
    tokens = axes["rows"] if axes["tokens"] is None else axes["tokens"]
    kinds: dict[str, dict[str, tuple[int, ...]]] = {
        "tensor": {"x_scales": (), "weight_scales": ()},
        "group": {"x_scales": (tokens,), "weight_scales": (axes["groups"],)},
        "column": {"x_scales": (tokens,), "weight_scales": (axes["groups"], axes["n"])},
    }
    return kinds[kind]


def _resized(axes: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """The axes with other sizes, and scales for these."""
    given = {**axes, **changed}
    for kind in ("column", "group", "tensor"):
        if all(axes[name] == size for name, size in _scale_axes(axes, kind).items()):
            return {**given, **_scale_axes(given, kind)}
    return given


def _scaled(name: str, axes: dict[str, Any], kind: str, present: tuple[str, ...] = (), **options: Any) -> Case:
    """An FP8 product. Its tensor cores keep about 13 bits of partial sums: float32 is not better than float16."""
    return Case(
        name, {**axes, **_scale_axes(axes, kind)}, options, present=(*present, "x_scale", "weight_scale"),
        gradients=False, dtype_of={"x": FP8, "weights": FP8},
        through=torch.float16 if options.get("out_dtype") == torch.float32 else None,
    )  # fmt: skip


_FEW = _groups(50, 5, 24, 40)
_CASES = (
    Case("plain", _FEW),
    Case("even", _groups(64, 4, 32, 32, empty=0)),
    Case("one-group", _groups(37, 1, 20, 24, empty=0)),
    Case("all-but-one-empty", _groups(33, 7, 20, 24, empty=6)),
    Case("odd", _groups(29, 3, 13, 7)),
    Case("several-tiles", _groups(150, 3, 70, 48)),
    Case("one-row-groups", _groups(5, 9, 24, 40, empty=3), present=("scatter", "row_weights")),
    Case("tail", _groups(60, 4, 24, 40, tail=17)),
    Case("gather", _groups(50, 4, 24, 40, tokens=20), present=("gather",)),
    Case("scatter", _FEW, present=("scatter",)),
    Case("scatter-into-more", _groups(40, 4, 24, 40, out_rows=100), {"out_rows": 100}, present=("scatter", "bias")),
    Case("bias", _FEW, present=("bias",)),
    Case("row-weights", _FEW, present=("row_weights",)),
    Case("everything", _groups(50, 4, 24, 40, tokens=20, tail=3), present=("gather", "scatter", "row_weights", "bias")),
    Case("float32-out", _FEW, {"out_dtype": torch.float32}),
    Case("padded", _FEW, present=("bias",), layout="padded"),
    Case("transposed", _FEW, present=("bias",), layout="transposed"),
    Case("weights-by-columns", _FEW, present=("bias",), layout_of={"weights": COLUMNS}),  # (groups, N, K) transposed
    Case("silu", _FEW, {"activation": "silu"}, present=("bias",)),
    Case("gelu-tail", _groups(60, 4, 24, 40, tail=17), {"activation": "gelu_tanh"}, present=("scatter", "row_weights")),
    *(Case(f"{gate.replace('_', '-')}-{packed}", _groups(50, 4, 48, 40, tokens=20, tail=3),
           {"activation": gate, "packed": packed}, present=present)
      for gate, present in (("swiglu", ("gather",)), ("gpt_oss_glu", ("gather", "scatter", "row_weights", "bias")))
      for packed in PACKINGS),
    Case("gate-odd", _groups(29, 3, 26, 7), {"activation": Gate("gpt_oss", 1.5, 0.5), "packed": "interleaved"},
         present=("bias",), dtypes=(torch.float32,)),  # z is often near the limit; rounded, it may be beyond it
    Case("preactivation", _groups(50, 4, 48, 40, tokens=20, tail=3),
         {"activation": "gpt_oss_glu", "packed": "interleaved", "return_preactivation": True},
         present=("gather", "bias")),
    Case("gate-no-groups", _groups(9, 0, 24, 8, tail=9), {"activation": "swiglu"}),
    _scaled("fp8-tensor", _groups(50, 4, 48, 64), "tensor"),
    _scaled("fp8-group", _groups(50, 4, 32, 80, tokens=20, tail=3), "group", ("gather", "scatter", "row_weights")),
    replace(_scaled("fp8-by-columns", _groups(50, 4, 48, 64), "column"), layout_of={"weights": COLUMNS}),
    _scaled("fp8-column", _groups(50, 4, 48, 33), "column", ("bias",), activation="swiglu", out_dtype=torch.float32),
    Case("no-rows", _groups(0, 3, 24, 40)),
    Case("no-columns", _groups(9, 3, 0, 40)),
    Case("no-k", _groups(9, 3, 24, 0), present=("bias",)),
    Case("no-groups", _groups(9, 0, 24, 8, tail=9)),
)  # fmt: skip


def _random_groups(rng: Rng, case: Case) -> Case:
    """Sizes that fit, scales for FP8 operands only, and no gradients where rounding may cross a kink."""
    left_out = ("out_rows", "return_preactivation")
    axes, options = dict(case.axes), {key: value for key, value in case.options.items() if key not in left_out}
    rows, activation = axes["rows"], options.get("activation")
    present = [name for name in case.present if not name.endswith("_scale")]
    axes |= {"empty": rng.call.randint(0, axes["groups"]), "out_rows": None,
             "tail": rng.call.randint(0, rows) if rng.maybe(0.2) else 0,
             "tokens": rng.size(1, 50) if "gather" in present else None}  # fmt: skip
    if not (isinstance(activation, Gate) or activation in GATES) and axes["n"] and not rng.aligned:
        axes["n"] -= rng.call.randint(0, 1)  # drawn even, as gate and up need it
    if "scatter" in present and rng.maybe():
        axes["out_rows"] = options["out_rows"] = rows + rng.call.randint(0, 9)
    eight_bits = "x" in case.dtype_of
    if eight_bits:
        present += ["x_scale", "weight_scale"]
        axes |= _scale_axes(axes, rng.one(("tensor", "group", "column")))
    dtype_of = {name: dtype for name, dtype in case.dtype_of.items() if name in ("x", "weights", *present)}
    kinked = isinstance(activation, Gate) and case.dtypes[0] != torch.float32
    through = torch.float16 if eight_bits and options.get("out_dtype") == torch.float32 else None
    return replace(case, axes=axes, options=options, present=tuple(present), dtype_of=dtype_of,
                   gradients=not eight_bits and not kinked, through=through)  # fmt: skip


def _sum_length(case: Case) -> int:
    """Terms of a sum: gate and up are two that are multiplied; a row weight's gradient adds results that cancel."""
    activation = case.options.get("activation")
    gated = isinstance(activation, Gate) or activation in GATES
    return case.axes["k"] * (2 if gated else 1) * (2 if "row_weights" in case.present else 1)


def _cost(case: Case, dtype: torch.dtype) -> Mapping[str, Cost]:
    """Every operand is read once and the output written once."""
    axes, each = case.axes, case.dtype_of.get("x", dtype).itemsize
    rows, groups, n, k = axes["rows"], axes["groups"], axes["n"], axes["k"]
    columns = n // 2 if case.options.get("activation") in GATES else n
    tokens = rows if axes["tokens"] is None else axes["tokens"]
    moved = (tokens * k + min(groups, rows) * n * k) * each + rows * columns * dtype.itemsize
    return {"fwd": Cost(2.0 * rows * n * k, moved), "bwd": Cost(4.0 * rows * n * k, 2 * moved)}


def _bench(
    name: str, rows: int, groups: int, n: int, k: int, *, tokens: int | None = None, sizes: str = "random",
    present: tuple[str, ...] = (), **options: Any,
) -> Case:  # fmt: skip
    small = {"rows": min(rows, 512), "groups": 4, "n": 256, "k": 256, "tokens": None if tokens is None else 128}
    axes = _groups(rows, groups, n, k, tokens=tokens, sizes=sizes, empty=0)
    return Case(name, axes, options, dtypes=_HALF, present=present, check_axes=small)


def _model_benches() -> Iterator[Case]:
    """Both products of the experts of real models, for a batch in training and for a few tokens in generation."""
    gpt_oss, mixtral, qwen = MODELS["gpt-oss-20b"], MODELS["mixtral-8x7b"], MODELS["qwen3-30b-a3b"]
    experts = {  # (sizes, experts, experts of each token, gate, packing, biases)
        "gpt-oss": (gpt_oss, 32, 4, "gpt_oss_glu", "interleaved", ("bias",)),
        "mixtral": (mixtral, 8, 2, "swiglu", "halves", ()),
        "qwen3-30b": (qwen, 128, 8, "swiglu", "halves", ()),
    }
    for name, (model, groups, each, gate, packed, biases) in experts.items():
        for tokens in (64, 8192):
            rows = tokens * each
            yield _bench(f"{name}-gate-up-{tokens}", rows, groups, 2 * model.intermediate, model.hidden, tokens=tokens,
                         sizes="zipf", present=("gather", *biases), activation=gate, packed=packed)  # fmt: skip
            yield _bench(f"{name}-down-{tokens}", rows, groups, model.hidden, model.intermediate, sizes="zipf",
                         present=("scatter", "row_weights", *biases))  # fmt: skip


def _fp8_bench(rows: int, groups: int, n: int, k: int) -> Case:
    """Weights are (groups, N, K): tensor cores read FP8 along K."""
    small = _groups(512, 4, 256, 256)
    return replace(
        _scaled(f"fp8-{groups}x{rows}x{n}x{k}", _groups(rows, groups, n, k, empty=0), "column"), dtypes=_HALF,
        layout_of={"weights": COLUMNS}, check_axes={**small, **_scale_axes(small, "column")},
    )  # fmt: skip


_BENCHES = (
    _bench("32x65536x2880x2880", 65536, 32, 2880, 2880),
    *(_bench(f"32x65536x2880x2880-{sizes}", 65536, 32, 2880, 2880, sizes=sizes) for sizes in ("even", "zipf")),
    _bench("32x65536x5760x2880-gather", 65536, 32, 5760, 2880, tokens=16384, present=("gather",)),
    _bench("32x65536x2880x2880-scatter", 65536, 32, 2880, 2880, present=("scatter",)),
    *(_bench(f"32x{rows}x2880x2880", rows, 32, 2880, 2880) for rows in (64, 256, 512)),
    _bench("128x65536x1536x2048", 65536, 128, 1536, 2048),
    *_model_benches(),
    _fp8_bench(65536, 32, 2880, 2880),
)

GROUPED_MATMUL = declare(
    _PACKAGE,
    "grouped_matmul",
    "a product for each group of rows in one launch, gathered and scattered: a mixture of experts",
    backward="grouped_weight_gradient",
    inputs=_INPUTS,
    kernels=(
        backends.hopper(f"{_PACKAGE}.hopper", eight_bit_gradients, (torch.bfloat16, torch.float16, FP8)),
        backends.triton(f"{_PACKAGE}.triton", triton_operands, dtypes=(*FLOATS, FP8), min_arch=80),
    ),
    workload=Workload(_CASES, _BENCHES, _cost),
    ranges={"rows": (0, 90, 1), "groups": (0, 6, 1), "n": (0, 60, 2), "k": (0, 70, 1)},
    resized=_resized,
    random_case=_random_groups,
    random_share=2,
    sum_length=_sum_length,
    baselines=(Baseline("grouped_mm", f"{_PACKAGE}.baselines:torch_grouped_mm"), "loop"),
)


def _gradient_cost(case: Case, dtype: torch.dtype) -> Mapping[str, Cost]:
    """x and dz are read once and dW is written once."""
    axes = case.axes
    rows, groups, n, k = axes["rows"], axes["groups"], axes["n"], axes["k"]
    tokens = rows if axes["tokens"] is None else axes["tokens"]
    moved = (tokens * k + rows * n + groups * n * k) * dtype.itemsize
    return {"fwd": Cost(2.0 * rows * n * k, moved)}


def _random_gradient(rng: Rng, case: Case) -> Case:
    axes = dict(case.axes)
    axes |= {"empty": rng.call.randint(0, axes["groups"]), "tail": rng.call.randint(0, axes["rows"])}
    axes["tokens"] = rng.size(1, 50) if "gather" in case.present else None
    return replace(case, axes=axes)


GROUPED_WEIGHT_GRADIENT = declare(
    _PACKAGE,
    "grouped_weight_gradient",
    "the gradient of a grouped product's weights, in one launch",
    inputs={
        "x": _Rows(("rows", "k")),
        "dz": Input(("rows", "n")),
        "group_offsets": _INPUTS["group_offsets"],
        "gather": _INPUTS["gather"],
    },
    kernels=(backends.hopper(f"{_PACKAGE}.hopper"), backends.triton(f"{_PACKAGE}.triton", min_arch=80)),
    differentiable=False,
    backward=None,
    cases=(
        Case("plain", _FEW),
        Case("odd", _groups(29, 3, 13, 7)),
        Case("gather-tail", _groups(50, 4, 24, 40, tokens=20, tail=3), present=("gather",)),
        Case("padded", _FEW, layout="padded"),
        Case("transposed", _FEW, layout="transposed"),
        Case("no-rows", _groups(0, 3, 24, 40)),
        Case("no-groups", _groups(9, 0, 24, 8, tail=9)),
    ),
    benches=(_bench("32x65536x2880x2880", 65536, 32, 2880, 2880),),
    cost=_gradient_cost,
    ranges={"rows": (0, 90, 1), "groups": (0, 6, 1), "n": (0, 60, 2), "k": (0, 70, 1)},
    resized=_resized,
    random_case=_random_gradient,
    baselines=(Baseline("grouped_mm", f"{_PACKAGE}.baselines:weight_gradient_grouped_mm"),),
)
