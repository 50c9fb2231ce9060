"""The declaration of the linear layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks.epilogue import ACTIVATIONS, GATES
from flashkernel.blocks.fp8 import FP8
from flashkernel.blocks.weight import GRANULARITIES, scales_shape
from flashkernel.blocks.weight import layouts as layouts
from flashkernel.core import backends
from flashkernel.core.op import Axes, Baseline, Case, Cost, Input, Op, count, normal
from flashkernel.core.random_case import Rng
from flashkernel.core.shapes import MODELS, Model
from flashkernel.ops.gemm import support
from flashkernel.ops.gemm.quantized.spec import quantized_linear

_PACKAGE = "flashkernel.ops.gemm"
_HALF = (torch.bfloat16,)


class _Residual(Input):
    """Of the output's shape: a packed weight has two columns for each of them, and an axis "residual" says so."""

    def shape(self, axes: Axes) -> tuple[int, ...]:
        return super().shape({**axes, "columns": axes.get("residual", axes["columns"])})


class _Scales(Input):
    """Scales of a weight in fp8; the axis "scales" says what shares one."""

    def shape(self, axes: Axes) -> tuple[int, ...]:
        return scales_shape(super().shape(axes), axes["scales"])


def _positive(shape: tuple[int, ...], axes: Axes, generator: torch.Generator) -> Tensor:
    """Such that products of a few hundred elements are of order one, as float16's limit wants them."""
    return torch.rand(shape, generator=generator, device=generator.device) * 0.4 + 0.1


def _scales(columns: str) -> Input:
    return _Scales((columns, "inner"), dtype=torch.float32, draw=_positive, grad=False, optional=True)


_INPUTS = {
    "x": Input(("*rows", "inner")),
    "weight": Input(("columns", "inner"), draw=normal(0.1)),
    "bias": Input(("columns",), optional=True),
    "residual": _Residual(("*rows", "columns"), optional=True),
    "norm_weight": Input(("inner",), draw=normal(0.3, 1.0), optional=True),
    "up": Input(("columns", "inner"), draw=normal(0.1), optional=True),
    "up_bias": Input(("columns",), optional=True),
    "second": Input(("second", "inner"), draw=normal(0.1), optional=True),
    "second_bias": Input(("second",), optional=True),
    "third": Input(("third", "inner"), draw=normal(0.1), optional=True),
    "third_bias": Input(("third",), optional=True),
    "weight_scales": _scales("columns"),
    "up_scales": _scales("columns"),
    "second_scales": _scales("second"),
    "third_scales": _scales("third"),
}
_SIZES = {"rows": 3, "columns": 24, "inner": 40}
_QKV = {"columns": 24, "second": 7, "third": 10}
_WITH_BIASES = ("bias", "up", "up_bias")
_THREE = ("second", "third", "bias", "second_bias", "third_bias")


def _case(name: str, present: tuple[str, ...] = (), axes: Axes | None = None, **options: Any) -> Case:
    return Case(name, {**_SIZES, **(axes or {})}, options, present=present)


def _fp8(name: str, scales: str, present: tuple[str, ...] = (), axes: Axes | None = None, **options: Any) -> Case:
    """A case with weights in fp8; `present` names no scales."""
    weights = ("weight", *(one for one in ("up", "second", "third") if one in present))
    case = _case(name, (*present, *(f"{one}_scales" for one in weights)), {**(axes or {}), "scales": scales}, **options)
    return replace(case, dtype_of=dict.fromkeys(weights, FP8))


def _format(name: str, format: str, present: tuple[str, ...] = (), axes: Axes | None = None, **options: Any) -> Case:
    """A case with a weight in a format that is dequantized; sizes drawn at random need not divide its groups.

    Where x is rounded to 8 bits, a tie falls to either side: a step of its scale, whatever the dtype.
    """
    case = _case(name, present, axes, format=format, **options)
    return replace(case, gradients=False, half_rule="activation_dtype" not in options)


_CASES = (
    _case("plain"),
    _case("one-row", axes={"rows": (), "inner": 300}),
    _case("bias", ("bias",), {"rows": 1}),
    _case("residual", ("bias", "residual"), {"rows": (2, 2), "columns": 33}),
    # A gain of about a half: float16's limit is for outputs of order one, and what the norm gives is rounded to float16
    # before the product, which costs 77 columns at a gain of two more than that limit.
    _case("norm", ("norm_weight",), {"rows": 2, "inner": 77}, norm_offset=-0.5, norm_eps=1e-3),
    _case("everything", ("bias", "residual", "norm_weight", "up", "up_bias"), activation="swiglu", scale=0.5),
    _case("gelu", ("bias",), activation="gelu"),
    _case("gelu-tanh", ("bias",), activation="gelu_tanh"),
    _case("silu", activation="silu"),
    _case("relu", activation="relu"),
    _case("squared-relu", activation="squared_relu"),
    _case("swiglu", ("up",), activation="swiglu"),
    _case("geglu", _WITH_BIASES, activation="geglu"),
    _case("geglu-exact", ("up",), activation="geglu_exact"),
    _case("reglu", activation="reglu"),
    _case("packed-halves", ("bias",), {"columns": 26}, activation="swiglu"),
    _case("packed-interleaved", ("bias",), {"columns": 26}, activation="gpt_oss_glu", packed="interleaved", scale=2.0),
    _case("three-weights", _THREE, _QKV),
    _case("three-weights-norm", ("second", "third", "norm_weight"), {**_QKV, "rows": 17}),
    Case("splits", {**_SIZES, "columns": 30}, {"splits": (16, 4, 10)}, gradients=False),
    Case("float32-out", _SIZES, {"out_dtype": torch.float32}, present=("residual",)),
    Case("float32-extras", _SIZES, present=("bias", "residual", "norm_weight"),
         dtypes=(torch.float16, torch.bfloat16),
         dtype_of={"bias": torch.float32, "residual": torch.float32, "norm_weight": torch.float32}),
    _case("some-rows", ("bias",), {"rows": 9, "columns": 70, "inner": 300}),
    _case("some-rows-everything", ("bias", "residual", "norm_weight", "up", "up_bias"),
          {"rows": (3, 11), "columns": 37, "inner": 65}, activation="gpt_oss_glu", scale=0.1),
    _case("most-rows", ("residual",), {"rows": 64, "columns": 90, "inner": 48}),
    _case("many-rows", ("bias",), {"rows": 65}, activation="silu"),
    Case("padded", {**_SIZES, "rows": (2, 3)}, present=("residual", "norm_weight"), layout="padded"),
    Case("transposed", {**_SIZES, "rows": (3, 2)}, present=("bias", "residual"), layout="transposed"),
    Case("transposed-one-row", {**_SIZES, "rows": 1}, {"activation": "reglu"}, present=("up",), layout="transposed"),
    _case("no-rows", ("bias",), {"rows": (0, 3)}),
    _case("no-columns", axes={"columns": 0}),
    _case("no-inner", ("bias",), {"inner": 0}),
    _case("one-element", ("bias",), {"rows": 1, "columns": 1, "inner": 1}),
    _fp8("fp8-tensor", "tensor"),
    _fp8("fp8-row", "row", ("bias", "residual"), {"columns": 33, "inner": 77}),
    _fp8("fp8-row-some-rows", "row", ("bias",), {"rows": 9, "columns": 70, "inner": 300}, activation="gelu"),
    _fp8("fp8-group", "group", (), {"columns": 21, "inner": 140}),
    _fp8("fp8-block", "block", ("residual",), {"columns": 140, "inner": 300}),
    _fp8("fp8-gate-up", "row", _WITH_BIASES, activation="swiglu", scale=0.5),
    _fp8("fp8-gate-up-norm", "tensor", ("up", "norm_weight"), {"rows": 17, "inner": 64}, activation="geglu"),
    _fp8("fp8-packed-halves", "row", ("bias",), {"columns": 26}, activation="swiglu"),
    _fp8("fp8-packed-interleaved", "row", (), {"columns": 26}, activation="swiglu", packed="interleaved"),
    _fp8("fp8-three-weights", "row", ("second", "third"), _QKV),
    _fp8("fp8-out-float32", "row", (), {"rows": (2, 3)}, out_dtype=torch.float32),
    _fp8("fp8-many-rows", "row", ("bias",), {"rows": 65}, activation="silu"),
    # Tensor cores keep about 13 bits of the partial sums of 8-bit floats: float32 is not better than float16.
    *(replace(case, gradients=False, through=torch.float16) for case in (
        _fp8("fp8-activations", "row", ("bias",), {"columns": 32, "inner": 48}, activation_dtype=FP8),
        _fp8("fp8-activations-block", "block", (), {"columns": 140, "inner": 260}, activation_dtype=FP8),
        _fp8("fp8-activations-gate", "tensor", ("bias",), {"rows": 70, "columns": 32, "inner": 48},
             activation="swiglu", scale=0.5, activation_dtype=FP8),
        _fp8("fp8-activations-residual", "row", ("residual",), {"rows": (2, 40), "columns": 33, "inner": 64},
             activation="gelu", scale=0.5, activation_dtype=FP8),
    )),
    replace(_fp8("fp8-padded", "row", ("residual",), {"rows": (2, 3)}), layout="padded"),
    replace(_fp8("fp8-transposed", "row", ("bias",), {"rows": 6, "inner": 32}), layout="transposed"),
    _fp8("fp8-no-rows", "row", ("bias",), {"rows": (0, 3)}),
    _fp8("fp8-no-inner", "block", ("bias",), {"inner": 0}),
    _format("fp8-e5m2", "fp8_e5m2 row", ("bias",)),
    _format("int8", "int8 row", ("bias",), {"inner": 77}, activation="silu"),
    _format("int8-smaller-last-group", "int8 1x32 zeros", ("bias",), {"inner": 77}),
    _format("int8-smaller-last-group-many-rows", "int8 1x64", (), {"rows": 33, "inner": 130, "columns": 40}, scale=0.2),
    _format("int8-group-wider-than-a-row", "int8 1x64", (), {"inner": 5}),
    _format("int8-tensor", "int8 tensor", ("residual",), {"columns": 33}),
    _format("int8-zeros", "int8 row zeros", (), {"rows": 9}),
    _format("int8-activations", "int8 row", ("bias",), {"inner": 48}, activation_dtype=torch.int8),
    _format("int8-activations-gate", "int8 tensor", ("residual",),
            {"rows": 70, "columns": 32, "inner": 48, "residual": 16},
            activation="swiglu", activation_dtype=torch.int8, scale=0.5),
    _format("int4", "int4 1x32", ("bias",), {"inner": 64}),
    _format("int4-zeros", "int4 1x64 zeros", ("bias",), {"inner": 128, "columns": 26}, activation="swiglu"),
    _format("int4-row", "int4 row", ("residual",), {"columns": 21, "inner": 46}),
    _format("int4-group", "int4 group", ("bias",), {"rows": 17, "inner": 256}, scale=0.5),
    _format("int4-no-rows", "int4 1x32", ("bias",), {"rows": (0, 3), "inner": 64}),
    _format("mxfp4", "mxfp4 1x32", ("bias",), {"inner": 96}),
    _format("mxfp4-many-rows", "mxfp4 1x32", (), {"rows": 65, "inner": 64}, activation="gelu"),
    _format("mxfp4-fp8-activations", "mxfp4 1x32", ("bias", "norm_weight"), {"rows": 9, "inner": 96, "columns": 40},
            activation="silu", activation_dtype=FP8),
    # As of fp8 weights: tensor cores keep about 13 bits of partial sums.
    *(replace(case, through=torch.float16) for case in (
        _format("mxfp4-fp8-activations-many-rows", "mxfp4 1x32", ("bias",), {"rows": 70, "inner": 64, "columns": 32},
                activation="swiglu", packed="interleaved", scale=0.5, activation_dtype=FP8),
        _format("mxfp4-fp8-activations-residual", "mxfp4 1x32", ("residual",), {"rows": (2, 40), "inner": 96},
                scale=0.5, activation_dtype=FP8),
    )),
    _format("int4-activations", "int4 1x32", ("bias", "residual"), {"rows": 9, "inner": 96},
            activation_dtype=torch.int8),
    _format("int8-groups", "int8 1x32", ("norm_weight",), {"columns": 33, "inner": 64}, activation_dtype=torch.int8),
    _format("q4_1", "q4_1 1x32", ("bias",), {"columns": 26, "inner": 224}, activation="swiglu", scale=0.2,
            activation_dtype=torch.int8),
    _format("q4_k", "q4_k 1x32", ("residual",), {"columns": 21, "inner": 256}, activation_dtype=torch.int8),
    _format("q4_k-many-rows", "q4_k 1x32", ("bias",), {"rows": 17, "columns": 21, "inner": 256}),
    _format("q6_k", "q6_k 1x16", (), {"rows": 5, "columns": 7, "inner": 512}, scale=0.5),
    _format("q6_k-activations", "q6_k 1x16", ("bias",), {"inner": 256}, activation="relu",
            activation_dtype=torch.int8),
    _format("int4-many-rows", "int4 1x64 zeros", ("bias",), {"rows": (3, 50), "inner": 192, "columns": 70}, scale=0.2),
    _format("int8-group-some-rows", "int8 1x32 zeros", ("norm_weight",), {"rows": 33, "inner": 160, "columns": 40},
            scale=0.2),
    _format("int8-blocks", "int8 block", (), {"inner": 140}),
    _format("int4-tiles", "int4_tiles 1x32", ("bias",), {"rows": 5, "inner": 128, "columns": 192},
            activation="silu", scale=0.3),
    _format("int4-tiles-gate", "int4_tiles group zeros", ("bias", "residual"),
            {"rows": 70, "inner": 128, "columns": 256, "residual": 128}, activation="swiglu", scale=0.05),
    _format("int8-tiles", "int8_tiles row", ("residual", "norm_weight"), {"rows": 17, "inner": 192, "columns": 64},
            scale=0.2),
    _format("mxfp4-tiles", "mxfp4_tiles 1x32", ("bias",), {"rows": 300, "inner": 64, "columns": 320}),
    _format("mxfp4-tiles-interleaved", "mxfp4_tiles 1x32", (), {"inner": 64, "columns": 128}, activation="gpt_oss_glu",
            packed="interleaved", scale=0.2),
)  # fmt: skip


_ROWS = ((1, 2, 7, 8, 9, 17), (1, 2, 7, 8, 9, 16, 33, 63, 64, 65, 130))  # small, large: around the row classes


# Formats of a random weight, and what its columns are multiples of.
_FORMATS = (
    ("int4 row", 2), ("int4 1x32", 32), ("int4 1x64 zeros", 64), ("int8 row zeros", 1), ("int8 1x32", 1),
    ("int8 1x64 zeros", 1), ("int8 tensor", 1), ("mxfp4 1x32", 32), ("fp8_e5m2 row", 1),
)  # fmt: skip


def _random_case(rng: Rng, case: Case) -> Case:
    """One weight with any epilogue, gate and up, or up to three weights; biases for all weights or none."""
    drawn_here = ("activation", "packed", "splits", "activation_dtype", "format")
    options = {name: value for name, value in case.options.items() if name not in drawn_here}
    axes = dict(case.axes)
    if not rng.empty():
        axes["rows"] = (*((2,) if rng.maybe(0.2) else ()), rng.call.choice(_ROWS[rng.large]))
    present = [name for name in ("norm_weight",) if rng.maybe() and axes["inner"]]
    kind = rng.one(("plain", "plain", "gate", "packed", "several", "splits"))
    biased = rng.maybe()
    weights = {"gate": ("up",), "several": rng.one((("second",), ("second", "third")))}.get(kind, ())
    present += [*weights, *(f"{name}_bias" for name in weights if biased), *(["bias"] if biased else [])]
    if kind in ("gate", "packed"):
        options |= {"activation": rng.one(tuple(GATES)), "packed": rng.one(("halves", "interleaved"))}
    elif kind == "plain" and rng.maybe():
        options["activation"] = rng.one(ACTIVATIONS)
    if kind == "several":
        axes |= {name: rng.size(1, axes["columns"]) for name in weights}
    if kind == "splits":
        first = rng.call.randint(0, axes["columns"])
        options["splits"] = (first, axes["columns"] - first)
    residual_width = axes["columns"] // 2 if kind == "packed" else axes["columns"]
    if kind not in ("several", "splits") and rng.maybe(0.3):
        present.append("residual")
        axes["residual"] = residual_width
    dtype_of = {name: dtype for name, dtype in case.dtype_of.items() if name in present and dtype != FP8}
    if rng.maybe(0.2) and not (kind == "gate" and options["activation"] == "gpt_oss_glu"):
        axes["scales"] = rng.one(tuple(GRANULARITIES))
        present += [f"{name}_scales" for name in ("weight", *weights)]
        dtype_of |= dict.fromkeys(("weight", *weights), FP8)
    elif kind in ("plain", "packed") and rng.maybe(0.3):
        options["format"], step = rng.one(_FORMATS)
        if options["format"].startswith("mxfp4") and "norm_weight" not in present and rng.maybe():
            options["activation_dtype"] = FP8
        axes["inner"] = -(-axes["inner"] // step) * step
    # Where a product lies so near to a kink that rounding takes it across, its gradient is another one.
    kinked = options.get("activation") in ("relu", "reglu", "gpt_oss_glu") and case.dtypes[0] != torch.float32
    gradients = kind != "splits" and not kinked and "format" not in options
    in_fp8 = "activation_dtype" in options
    return replace(case, axes=axes, options=options, present=tuple(present), dtype_of=dtype_of,
                   gradients=gradients, through=torch.float16 if in_fp8 else None,
                   half_rule=case.half_rule and not in_fp8)  # fmt: skip


_Layers = dict[str, tuple[Axes, tuple[str, ...], dict[str, Any]]]  # axes, optional inputs, options, by name


def _layer(model: Model) -> _Layers:
    """The linear layers of a transformer."""
    hidden, queries, keys = model.hidden, model.heads * model.head_dim, model.kv_heads * model.head_dim
    return {
        "qkv": (
            {"inner": hidden, "columns": queries, "second": keys, "third": keys},
            ("second", "third", "norm_weight"), {},
        ),
        "o": ({"inner": queries, "columns": hidden}, ("residual",), {}),
        "gate-up": ({"inner": hidden, "columns": model.intermediate}, ("up", "norm_weight"), {"activation": "swiglu"}),
        "down": ({"inner": model.intermediate, "columns": hidden}, ("residual",), {}),
        "lm-head": ({"inner": hidden, "columns": model.vocab}, ("norm_weight",), {}),
    }  # fmt: skip


def _benches() -> tuple[Case, ...]:
    gpt2, gpt_oss = _layer(MODELS["gpt2"]), _layer(MODELS["gpt-oss-20b"])
    hidden = MODELS["gpt2"].hidden
    gpt2 = {  # LayerNorm stays outside
        "qkv": ({"inner": hidden, "columns": 3 * hidden}, ("bias",), {}),
        "o": (gpt2["o"][0], ("bias", "residual"), {}),
        "up": ({"inner": hidden, "columns": 4 * hidden}, ("bias",), {"activation": "gelu_tanh"}),
        "down": (gpt2["down"][0], ("bias", "residual"), {}),
        "lm-head": (gpt2["lm-head"][0], (), {}),
    }
    gpt_oss = {
        "qkv": (gpt_oss["qkv"][0], ("second", "third", "norm_weight", "bias", "second_bias", "third_bias"), {}),
        "o": (gpt_oss["o"][0], ("bias", "residual"), {}),
    }
    tables: dict[str, _Layers] = {
        "plain": {"4096x14336": ({"inner": 4096, "columns": 14336}, (), {})},
        "llama-1b": _layer(MODELS["llama-3.2-1b"]),
        "llama-8b": _layer(MODELS["llama-3.1-8b"]),
        "gpt2": gpt2,
        "gpt-oss": gpt_oss,
    }
    few = tuple(
        Case(f"{model}-{layer}-{rows}", {**axes, "rows": rows}, options, dtypes=_HALF, present=present, gradients=False)
        for model, layers in tables.items()
        for layer, (axes, present, options) in layers.items()
        for rows in (1, 4, 16, 64)
    )
    return (few[0], *_many_rows(tables), *few[1:])  # a row first, and 64 last: `doctor` names the backends of both


def _many_rows(tables: Mapping[str, _Layers]) -> tuple[Case, ...]:
    """Training, prompts, and prompts with weights and activations in fp8; few rows with gradients."""
    small = {"rows": 256, "columns": 512, "inner": 256}
    plain = []
    trained = (("llama-8b gate-up", 8192), ("llama-8b down", 8192), ("gpt2 up", 16384), ("gpt2 up", 32),
               ("llama-1b gate-up", 2))  # fmt: skip
    for name, rows in trained:
        model, layer = name.split()
        axes, present, options = tables[model][layer]
        plain.append(Case(f"{model}-{layer}-{rows}", {**axes, "rows": rows}, options, dtypes=_HALF, present=present,
                          check_axes=small if rows > 256 else {}))  # fmt: skip
    hidden, inner = MODELS["llama-3.1-8b"].hidden, MODELS["llama-3.1-8b"].intermediate
    in_fp8 = (
        _fp8("fp8-row-llama-8b-gate-up-8192", "row", (), {"inner": hidden, "columns": 2 * inner, "rows": 8192},
             activation="swiglu", activation_dtype=FP8),
        _fp8("fp8-block-llama-8b-down-8192", "block", ("residual",), {"inner": inner, "columns": hidden, "rows": 8192},
             activation_dtype=FP8),
    )  # fmt: skip
    return (*(replace(case, dtypes=_HALF, gradients=False, check_axes=small) for case in in_fp8), *plain)


def _cost(case: Case, dtype: torch.dtype) -> Mapping[str, Cost]:
    """Every weight is read once; x, the residual and the output as well."""
    rows, inner = count(case.axes["rows"]), case.axes["inner"]
    matrices = [name for name in ("columns", "second", "third") if name == "columns" or name in case.present]
    computed = sum(case.axes[name] for name in matrices) * (2 if "up" in case.present else 1)
    packed = case.options.get("activation") in GATES and "up" not in case.present
    outputs = sum(case.axes[name] for name in matrices) // (2 if packed else 1)
    moved = computed * inner + rows * (inner + outputs * (2 if "residual" in case.present else 1))
    product = 2.0 * rows * computed * inner
    return {
        "fwd": Cost(product, moved * dtype.itemsize),
        "bwd": Cost(2 * product, (moved + computed * inner) * dtype.itemsize),
    }


LINEAR = Op(
    name="linear",
    backward=None,  # the gradient is made of torch's products
    summary="linear layer with norm, bias, activation, gate and residual",
    function=f"{_PACKAGE}.named:linear",
    reference=f"{_PACKAGE}.named:reference",
    inputs=_INPUTS,
    backends=(
        replace(
            backends.hopper(f"{_PACKAGE}.dense:linear", support.hopper, deprioritized=support.hopper_is_slower),
            composite=True,
        ),
        replace(backends.triton(f"{_PACKAGE}.triton", support.triton), deprioritized=support.cublas_is_faster),
        backends.cuda(
            f"{_PACKAGE}.cuda",
            support.reads_cuda,
            dtypes=(torch.float16, torch.bfloat16),
            auto_devices=("cuda",),
            deprioritized=support.others_are_faster,
        ),
        backends.cpp(f"{_PACKAGE}.cpp", support.cpp),
        backends.torch_native(f"{_PACKAGE}.torch:linear"),
        backends.reference(f"{_PACKAGE}.reference:linear"),
    ),
    cases=_CASES,
    benches=_benches(),
    cost=_cost,
    sum_length=lambda case: case.axes["inner"],
    # Even, because a packed weight holds two columns for each of the output.
    ranges={"rows": (0, 5, 1), "columns": (2, 60, 2), "inner": (1, 90, 1)},
    random_case=_random_case,
    random_share=4,
    baselines=(Baseline("eager", f"{_PACKAGE}.baselines:eager"), Baseline("compile", f"{_PACKAGE}.baselines:compiled")),
)
# Its cases have gradients, which the C++ kernels do not; the cases of `linear` cover these.
_OF_FLOATS = ("cuda", "cpp")  # whose kernels read no quantized tensors
QUANTIZED_LINEAR = quantized_linear(tuple(one for one in LINEAR.backends if one.name not in _OF_FLOATS))
OPS = (LINEAR, QUANTIZED_LINEAR)
