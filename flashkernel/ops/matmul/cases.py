"""The cases that matrix products are checked on, and random ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from flashkernel.blocks.epilogue import ACTIVATIONS, GATES, Gate, activation_width
from flashkernel.blocks.fp8 import FP8, SCALE_BLOCK
from flashkernel.core.op import Case
from flashkernel.core.random_case import Rng


def axes_of(m: int, n: int, k: int, a: tuple[int, ...] = (), b: tuple[int, ...] = ()) -> dict[str, Any]:
    batch = () if not a + b else b if a in ((), (1,)) and b else a
    return {"m": m, "n": n, "k": k, "a_batch": a, "b_batch": b, "c_batch": batch, "a_scales": (), "b_scales": (),
            "out_scales": ()}  # fmt: skip


def scaled(name: str, dtype: torch.dtype, axes: dict[str, Any], kind: str, **options: Any) -> Case:
    return Case(
        name, {**axes, **scale_axes(axes, kind)}, options, present=("a_scale", "b_scale"), gradients=False,
        dtype_of={"a": dtype, "b": dtype}, through=_tensor_core_dtype(dtype, options),
    )  # fmt: skip


def _quantized(name: str, axes: dict[str, Any], present: tuple[str, ...] = (), **options: Any) -> Case:
    """A case with an output in fp8."""
    given = present if "out_quantize" in options else (*present, "out_scale")
    return Case(name, axes, options, present=given, gradients=False)


def _tensor_core_dtype(dtype: torch.dtype, options: Mapping[str, Any]) -> torch.dtype | None:
    """FP8 tensor cores keep about 13 bits of partial sums: a float32 output is not better than float16."""
    return torch.float16 if dtype == FP8 and options.get("out_dtype") == torch.float32 else None


def scale_axes(axes: Mapping[str, Any], kind: str) -> dict[str, tuple[int, ...]]:
    m, n, blocks_k = axes["m"], axes["n"] * axes.get("b_parts", 1), -(-axes["k"] // SCALE_BLOCK)
    blocks_n = -(-n // SCALE_BLOCK)
    kinds: dict[str, dict[str, tuple[int, ...]]] = {
        "tensor": {"a_scales": (), "b_scales": ()},
        "row": {"a_scales": (m,), "b_scales": (n,)},
        "batch": {"a_scales": (*axes["a_batch"], m, 1), "b_scales": (*axes["b_batch"], 1, n)},
        "block": {"a_scales": (*axes["a_batch"], m, blocks_k), "b_scales": (*axes["b_batch"], blocks_k, blocks_n)},
    }
    return kinds[kind]


def resized(axes: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """The axes with other sizes, and scales for these; how b is packed is no size."""
    given = {**axes, **changed, **{name: axes[name] for name in ("b_parts", "z_parts") if name in axes}}
    if axes["out_scales"]:
        given["out_scales"] = (*given["out_scales"][:-2], given["m"], 1)
    kind = scale_kind(axes)
    return given if kind is None else {**given, **scale_axes(given, kind)}


def scale_kind(axes: Mapping[str, Any]) -> str | None:
    """What shares the scales of 8-bit operands: "block", "row", "batch" (rows of each), "tensor"; None for others."""
    for kind in ("block", "row", "batch", "tensor"):
        if all(axes[name] == size for name, size in scale_axes(axes, kind).items()):
            return kind
    return None


def gated_axes(m: int, n: int, k: int, a: tuple[int, ...] = (), b: tuple[int, ...] = ()) -> dict[str, Any]:
    """Gate and up in one b."""
    return {**axes_of(m, n, k, a, b), "b_parts": 2}


_SMALL = axes_of(33, 24, 40)
_PAIR = ("bias", "up", "up_bias")
CASES = (
    Case("plain", _SMALL),
    Case("several-tiles", axes_of(70, 90, 100)),
    Case("odd", axes_of(17, 13, 7)),
    Case("one-row", axes_of(1, 50, 64), present=("bias",)),
    Case("one-column", axes_of(37, 1, 40), present=("residual",)),
    Case("one-k", axes_of(20, 30, 1)),
    *(Case(f"transposed-{'-'.join(which)}", axes_of(48, 64, 40), layout_of=dict.fromkeys(which, "transposed"))
      for which in (("a",), ("b",), ("a", "b"))),
    Case("batch", axes_of(20, 24, 16, (3,), (3,)), present=("bias", "residual")),
    Case("batch-of-a", axes_of(20, 24, 16, (3,)), present=("residual",)),
    Case("batch-of-b", axes_of(20, 24, 16, (), (2,))),
    Case("broadcast-a", axes_of(9, 24, 16, (1,), (2,)), {"activation": "silu"}),
    Case("broadcast-b", axes_of(9, 24, 16, (2,), (1,)), {"activation": "gelu"}, present=("bias",)),
    Case("bias", _SMALL, present=("bias",)),
    Case("residual", _SMALL, {"scale": 0.5}, present=("bias", "residual")),
    *(Case(kind.replace("_", "-"), _SMALL, {"activation": kind, "scale": 0.5}, present=("bias",))
      for kind in ACTIVATIONS),
    Case("everything", axes_of(33, 24, 40, (2,), (2,)), {"activation": "gelu_tanh", "scale": 0.5},
         present=("bias", "residual")),
    Case("float32-out", _SMALL, {"out_dtype": torch.float32}, present=("residual",)),
    Case("float32-extras", _SMALL, present=("bias", "residual"), dtypes=(torch.float16, torch.bfloat16),
         dtype_of={"bias": torch.float32, "residual": torch.float32}),
    Case("padded", axes_of(33, 24, 40, (2,), (2,)), {"activation": "relu"}, present=("residual",), layout="padded"),
    Case("transposed", axes_of(33, 24, 40), {"activation": "silu", "scale": 0.5}, present=("bias", "residual"),
         layout="transposed"),
    Case("no-rows", axes_of(0, 24, 40), present=("bias",)),
    Case("no-rows-of-a-batch", axes_of(0, 24, 40, (3,), ())),
    Case("no-columns", axes_of(33, 0, 40)),
    Case("no-k", axes_of(5, 24, 0), present=("bias",)),
    Case("no-batch", axes_of(5, 24, 8, (0,), (1,))),
    *(Case(f"{kind.replace('_', '-')}-{packed}", gated_axes(33, 24, 40), {"activation": kind, "packed": packed},
           present=("bias",)) for kind, packed in zip(GATES, ("halves", "interleaved") * 3)),
    Case("gate-pair", _SMALL, {"activation": "swiglu", "scale": 0.5}, present=(*_PAIR, "residual")),
    Case("gate-tiles", gated_axes(70, 90, 100), {"activation": "swiglu", "packed": "interleaved"}),
    Case("gate-odd", gated_axes(17, 13, 7), {"activation": "geglu"}, present=("bias",)),
    Case("gate-weight", gated_axes(40, 48, 64), {"activation": "swiglu"}, layout_of={"b": "transposed"}),
    Case("gate-weight-interleaved", gated_axes(40, 48, 64),
         {"activation": Gate("gpt_oss", 1.5, 5.0), "packed": "interleaved"}, present=("bias",),
         layout_of={"b": "transposed"}),
    Case("gate-batch", gated_axes(20, 24, 16, (3,), (3,)), {"activation": "swiglu"}, present=("residual",)),
    Case("gate-batch-of-a", gated_axes(20, 24, 16, (3,)), {"activation": "swiglu", "packed": "interleaved"}),
    Case("gate-padded", gated_axes(33, 24, 40), {"activation": "geglu"}, present=("bias",), layout="padded"),
    Case("gate-pair-padded", _SMALL, {"activation": "reglu"}, present=("up", "residual"), layout="padded"),
    Case("gate-no-rows", gated_axes(0, 24, 40), {"activation": "swiglu"}, present=("bias",)),
    Case("gate-no-k", gated_axes(5, 24, 0), {"activation": "swiglu"}, present=("bias",)),
    Case("preactivation", _SMALL, {"activation": "gelu", "return_preactivation": True}, present=("bias",)),
    Case("preactivation-linear", _SMALL, {"scale": 0.5, "return_preactivation": True}, present=("bias", "residual")),
    *(Case(f"preactivation-{packed}", gated_axes(33, 24, 40),
           {"activation": "swiglu", "packed": packed, "return_preactivation": True}, present=("bias",))
      for packed in ("halves", "interleaved")),
    Case("preactivation-pair", axes_of(20, 24, 16, (2,), (2,)), {"activation": "geglu", "return_preactivation": True},
         present=_PAIR),
    Case("dropout", _SMALL, {"dropout": 0.3, "seed": 11}, present=("bias", "residual")),
    Case("dropout-activation", axes_of(20, 24, 16, (3,)),
         {"activation": "gelu", "dropout": 0.25, "seed": 5, "scale": 0.5}),
    Case("dropout-gate", gated_axes(70, 50, 40), {"activation": "swiglu", "dropout": 0.5, "seed": 1 << 40,
         "return_preactivation": True}, present=("residual",)),
    Case("dropout-batch", axes_of(17, 13, 16, (2,), (2,)), {"dropout": 0.1, "seed": 3}, layout="padded"),
    Case("out", _SMALL, {"activation": "silu"}, present=("bias", "out"), gradients=False),
    Case("out-padded", axes_of(20, 24, 16, (2,), (2,)), {"return_preactivation": True}, present=("residual", "out"),
         layout="padded", gradients=False),
    Case("out-transposed", _SMALL, present=("out",), layout="transposed", gradients=False),
    Case("out-added", axes_of(70, 50, 40), {"accumulate": True}, present=("out",), gradients=False),
    Case("out-added-float32", axes_of(33, 24, 40, (2,), (2,)), {"accumulate": True, "scale": 0.5}, present=("out",),
         gradients=False, dtype_of={"out": torch.float32}),
    _quantized("fp8-out", axes_of(33, 48, 64), out_dtype=FP8),
    _quantized("fp8-out-row", {**axes_of(33, 24, 40), "out_scales": (33, 1)}, ("bias", "residual"), out_dtype=FP8),
    _quantized("fp8-out-batch", {**axes_of(17, 20, 16, (2,), (2,)), "out_scales": (2, 17, 1)}, activation="silu",
               out_dtype=FP8),
    _quantized("fp8-out-blocks", axes_of(33, 300, 40), ("bias",), out_quantize="block"),
    _quantized("fp8-out-blocks-batch", axes_of(20, 130, 16, (3,)), ("residual",), out_quantize="block"),
    _quantized("fp8-out-blocks-gate", gated_axes(33, 140, 40), activation="reglu", out_quantize="block",
               return_preactivation=True),
    _quantized("fp8-out-rows", axes_of(33, 70, 40), ("bias",), out_quantize="row"),
    _quantized("fp8-out-rows-gate", gated_axes(17, 30, 16, (2,), (2,)), activation="swiglu", out_quantize="row"),
    _quantized("fp8-out-no-columns", axes_of(5, 0, 8), out_quantize="row"),
    scaled("fp8-tensor", FP8, axes_of(33, 48, 64), "tensor"),
    scaled("fp8-row", FP8, axes_of(33, 48, 80), "row", activation="silu"),
    scaled("fp8-batch", FP8, axes_of(17, 20, 32, (2,), (2,)), "batch", out_dtype=torch.float32),
    scaled("fp8-block", FP8, axes_of(20, 140, 300), "block"),
    scaled("int8-tensor", torch.int8, axes_of(33, 48, 64), "tensor"),
    scaled("int8-row", torch.int8, axes_of(17, 20, 50), "row", out_dtype=torch.float32),
    scaled("fp8-gate", FP8, gated_axes(33, 48, 80), "row", activation="swiglu", return_preactivation=True),
    scaled("fp8-gate-interleaved", FP8, gated_axes(33, 24, 64), "row", activation="swiglu", packed="interleaved"),
    scaled("fp8-gate-block", FP8, gated_axes(20, 128, 300), "block", activation="swiglu"),
    scaled("fp8-gate-block-interleaved", FP8, gated_axes(9, 80, 200), "block", activation="geglu",
           packed="interleaved"),
    scaled("int8-gate", torch.int8, gated_axes(17, 20, 50), "tensor", activation="swiglu"),
)  # fmt: skip


def random_case(rng: Rng, case: Case) -> Case:
    """Batches that fit, scales for 8-bit operands only, and no gradients where rounding may cross a kink."""
    axes, options, present = dict(case.axes), dict(case.options), list(case.present)
    batch = rng.call.choice((1, 2, 3))
    left, right = rng.one((((), ()), ((), ()), ((batch,), (batch,)), ((batch,), ()), ((1,), (batch,)), ((), (batch,))))
    axes |= {"a_batch": left, "b_batch": right, "c_batch": axes_of(1, 1, 1, left, right)["c_batch"]}
    eight_bits = "a" in case.dtype_of
    gated = activation_width(options.get("activation")) == 2
    absent = ("a_scale", "b_scale", "up_bias", *(() if gated and not eight_bits else ("up",)))
    present = [name for name in present if name not in absent]
    if "up" in present and "bias" in present:
        present.append("up_bias")
    axes.pop("b_parts", None)
    if gated and "up" not in present:
        axes["b_parts"] = 2
    if eight_bits and options.get("out_quantize") == "row":  # the exact result is rounded to bfloat16, too
        options["out_quantize"] = "block"
    if options.get("out_quantize") is not None:
        options.pop("out_dtype", None)
        options.pop("accumulate", None)
        present = [name for name in present if name not in ("out", "out_scale")]
    if options.get("out_dtype") == FP8:
        axes["out_scales"] = rng.one(((), (axes["m"], 1)))
    else:
        present = [name for name in present if name != "out_scale"]
    if "out" in present:
        options.pop("out_dtype", None)
        present = [name for name in present if name != "out_scale"]
    quantizes = "out_quantize" in options or options.get("out_dtype") == FP8
    options.pop("seed", None)
    if "dropout" in options:
        options["seed"] = rng.call.getrandbits(40)
    if options.pop("accumulate", False) and "out" in present:
        options["accumulate"] = True
        present = [name for name in present if name != "residual"]
    dtype_of = {name: dtype for name, dtype in case.dtype_of.items() if name in ("a", "b", *present)}
    if eight_bits:
        present += ["a_scale", "b_scale"]
        axes |= scale_axes(axes, rng.one(("tensor", "row", "batch", "block")))
    kinked = options.get("activation") in ("relu", "reglu", "gpt_oss_glu") or isinstance(
        options.get("activation"), Gate
    )
    return replace(case, axes=axes, options=options, present=tuple(present), dtype_of=dtype_of,
                   gradients=not eight_bits and not (kinked and case.dtypes[0] != torch.float32)
                   and "out" not in present and not quantizes,
                   through=_tensor_core_dtype(case.dtype_of.get("a", torch.float32), options))  # fmt: skip
