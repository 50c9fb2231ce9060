"""The declaration of the matrix products."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks.epilogue import ACTIVATIONS, GATES, Gate, activation_width
from flashkernel.blocks.fp8 import FP8, SCALE_BLOCK
from flashkernel.core import backends
from flashkernel.core.declare import Workload, declare
from flashkernel.core.op import FLOATS, Axes, Baseline, Call, Case, Cost, Input, count, normal
from flashkernel.core.random_case import Rng
from flashkernel.core.shapes import MODELS
from flashkernel.ops.matmul.grouped.spec import (
    GROUPED_MATMUL,
    GROUPED_WEIGHT_GRADIENT,
    eight_bit_gradients,
    triton_operands,
)

_ROOM = "flashkernel.ops.matmul"
_HALF = (torch.bfloat16,)


def gate_fact(activation: Any, how: str, scaling: str, n: int) -> str:
    """The fact "gated" of a product with n columns: "" without a gate, else "halves", "interleaved" or "pair".

    "split-blocks": columns of gate and up share scales.
    """
    if activation_width(activation) == 1:
        return ""
    return "split-blocks" if scaling == "block" and (how != "halves" or n % SCALE_BLOCK) else how


def _gates(call: Call) -> str | None:
    if call.facts["gated"] == "split-blocks":
        return f"gate and up share scales of b; pack halves of a multiple of {SCALE_BLOCK} columns"
    return None


def _triton(call: Call) -> str | None:
    return triton_operands(call) or _gates(call)


def _hopper(call: Call) -> str | None:
    if call.facts["gated"] and call.facts["scaling"] == "block":
        return "gate and up with block scales would need four accumulators"
    return eight_bit_gradients(call) or _gates(call)


def _cublas_is_faster(call: Call) -> str | None:
    if call.dtype.itemsize > 1 and not call.facts["fused"]:
        return "cuBLAS serves products without an activation better"
    return None


def _positive(shape: tuple[int, ...], axes: Axes, generator: torch.Generator) -> Tensor:
    return 0.5 + torch.rand(shape, generator=generator, device=generator.device)


class _PerColumn(Input):
    """A tensor with as many columns as b has: n, or with an axis "b_parts" so many times n."""

    def shape(self, axes: Axes) -> tuple[int, ...]:
        return super().shape({**axes, "n": axes["n"] * axes.get("b_parts", 1)})


_INPUTS = {
    "a": Input(("*a_batch", "m", "k")),
    "b": _PerColumn(("*b_batch", "k", "n"), draw=normal(0.1)),
    "bias": _PerColumn(("n",), optional=True),
    "residual": Input(("*c_batch", "m", "n"), optional=True),
    "up": Input(("*b_batch", "k", "n"), draw=normal(0.1), optional=True),
    "up_bias": Input(("n",), optional=True),
    "out": Input(("*c_batch", "m", "n"), grad=False, optional=True),
    "out_scale": Input(("*out_scales",), torch.float32, _positive, grad=False, optional=True),
    "a_scale": Input(("*a_scales",), torch.float32, _positive, grad=False, optional=True),
    "b_scale": Input(("*b_scales",), torch.float32, _positive, grad=False, optional=True),
}


def _axes(m: int, n: int, k: int, a: tuple[int, ...] = (), b: tuple[int, ...] = ()) -> dict[str, Any]:
    batch = () if not a + b else b if a in ((), (1,)) and b else a
    return {"m": m, "n": n, "k": k, "a_batch": a, "b_batch": b, "c_batch": batch, "a_scales": (), "b_scales": (),
            "out_scales": ()}  # fmt: skip


def _scaled(name: str, dtype: torch.dtype, axes: dict[str, Any], kind: str, **options: Any) -> Case:
    return Case(
        name, {**axes, **_scale_axes(axes, kind)}, options, present=("a_scale", "b_scale"), gradients=False,
        dtype_of={"a": dtype, "b": dtype}, through=_tensor_core_dtype(dtype, options),
    )  # fmt: skip


def _quantized(name: str, axes: dict[str, Any], present: tuple[str, ...] = (), **options: Any) -> Case:
    """A case with an output in fp8."""
    given = present if "out_quantize" in options else (*present, "out_scale")
    return Case(name, axes, options, present=given, gradients=False)


def _tensor_core_dtype(dtype: torch.dtype, options: Mapping[str, Any]) -> torch.dtype | None:
    """FP8 tensor cores keep about 13 bits of partial sums: a float32 output is not better than float16."""
    return torch.float16 if dtype == FP8 and options.get("out_dtype") == torch.float32 else None


def _scale_axes(axes: Mapping[str, Any], kind: str) -> dict[str, tuple[int, ...]]:
    m, n, blocks_k = axes["m"], axes["n"] * axes.get("b_parts", 1), -(-axes["k"] // SCALE_BLOCK)
    blocks_n = -(-n // SCALE_BLOCK)
    kinds: dict[str, dict[str, tuple[int, ...]]] = {
        "tensor": {"a_scales": (), "b_scales": ()},
        "row": {"a_scales": (m,), "b_scales": (n,)},
        "batch": {"a_scales": (*axes["a_batch"], m, 1), "b_scales": (*axes["b_batch"], 1, n)},
        "block": {"a_scales": (*axes["a_batch"], m, blocks_k), "b_scales": (*axes["b_batch"], blocks_k, blocks_n)},
    }
    return kinds[kind]


def _packed(m: int, n: int, k: int, a: tuple[int, ...] = (), b: tuple[int, ...] = ()) -> dict[str, Any]:
    """Gate and up in one b."""
    return {**_axes(m, n, k, a, b), "b_parts": 2}


_SMALL = _axes(33, 24, 40)
_PAIR = ("bias", "up", "up_bias")
_CASES = (
    Case("plain", _SMALL),
    Case("several-tiles", _axes(70, 90, 100)),
    Case("odd", _axes(17, 13, 7)),
    Case("one-row", _axes(1, 50, 64), present=("bias",)),
    Case("one-column", _axes(37, 1, 40), present=("residual",)),
    Case("one-k", _axes(20, 30, 1)),
    *(Case(f"transposed-{'-'.join(which)}", _axes(48, 64, 40), layout_of=dict.fromkeys(which, "transposed"))
      for which in (("a",), ("b",), ("a", "b"))),
    Case("batch", _axes(20, 24, 16, (3,), (3,)), present=("bias", "residual")),
    Case("batch-of-a", _axes(20, 24, 16, (3,)), present=("residual",)),
    Case("batch-of-b", _axes(20, 24, 16, (), (2,))),
    Case("broadcast-a", _axes(9, 24, 16, (1,), (2,)), {"activation": "silu"}),
    Case("broadcast-b", _axes(9, 24, 16, (2,), (1,)), {"activation": "gelu"}, present=("bias",)),
    Case("bias", _SMALL, present=("bias",)),
    Case("residual", _SMALL, {"scale": 0.5}, present=("bias", "residual")),
    *(Case(kind.replace("_", "-"), _SMALL, {"activation": kind, "scale": 0.5}, present=("bias",))
      for kind in ACTIVATIONS),
    Case("everything", _axes(33, 24, 40, (2,), (2,)), {"activation": "gelu_tanh", "scale": 0.5},
         present=("bias", "residual")),
    Case("float32-out", _SMALL, {"out_dtype": torch.float32}, present=("residual",)),
    Case("float32-extras", _SMALL, present=("bias", "residual"), dtypes=(torch.float16, torch.bfloat16),
         dtype_of={"bias": torch.float32, "residual": torch.float32}),
    Case("padded", _axes(33, 24, 40, (2,), (2,)), {"activation": "relu"}, present=("residual",), layout="padded"),
    Case("transposed", _axes(33, 24, 40), {"activation": "silu", "scale": 0.5}, present=("bias", "residual"),
         layout="transposed"),
    Case("no-rows", _axes(0, 24, 40), present=("bias",)),
    Case("no-rows-of-a-batch", _axes(0, 24, 40, (3,), ())),
    Case("no-columns", _axes(33, 0, 40)),
    Case("no-k", _axes(5, 24, 0), present=("bias",)),
    Case("no-batch", _axes(5, 24, 8, (0,), (1,))),
    *(Case(f"{kind.replace('_', '-')}-{packed}", _packed(33, 24, 40), {"activation": kind, "packed": packed},
           present=("bias",)) for kind, packed in zip(GATES, ("halves", "interleaved") * 3)),
    Case("gate-pair", _SMALL, {"activation": "swiglu", "scale": 0.5}, present=(*_PAIR, "residual")),
    Case("gate-tiles", _packed(70, 90, 100), {"activation": "swiglu", "packed": "interleaved"}),
    Case("gate-odd", _packed(17, 13, 7), {"activation": "geglu"}, present=("bias",)),
    Case("gate-weight", _packed(40, 48, 64), {"activation": "swiglu"}, layout_of={"b": "transposed"}),
    Case("gate-weight-interleaved", _packed(40, 48, 64),
         {"activation": Gate("gpt_oss", 1.5, 5.0), "packed": "interleaved"}, present=("bias",),
         layout_of={"b": "transposed"}),
    Case("gate-batch", _packed(20, 24, 16, (3,), (3,)), {"activation": "swiglu"}, present=("residual",)),
    Case("gate-batch-of-a", _packed(20, 24, 16, (3,)), {"activation": "swiglu", "packed": "interleaved"}),
    Case("gate-padded", _packed(33, 24, 40), {"activation": "geglu"}, present=("bias",), layout="padded"),
    Case("gate-pair-padded", _SMALL, {"activation": "reglu"}, present=("up", "residual"), layout="padded"),
    Case("gate-no-rows", _packed(0, 24, 40), {"activation": "swiglu"}, present=("bias",)),
    Case("gate-no-k", _packed(5, 24, 0), {"activation": "swiglu"}, present=("bias",)),
    Case("preactivation", _SMALL, {"activation": "gelu", "return_preactivation": True}, present=("bias",)),
    Case("preactivation-linear", _SMALL, {"scale": 0.5, "return_preactivation": True}, present=("bias", "residual")),
    *(Case(f"preactivation-{packed}", _packed(33, 24, 40),
           {"activation": "swiglu", "packed": packed, "return_preactivation": True}, present=("bias",))
      for packed in ("halves", "interleaved")),
    Case("preactivation-pair", _axes(20, 24, 16, (2,), (2,)), {"activation": "geglu", "return_preactivation": True},
         present=_PAIR),
    Case("dropout", _SMALL, {"dropout": 0.3, "seed": 11}, present=("bias", "residual")),
    Case("dropout-activation", _axes(20, 24, 16, (3,)),
         {"activation": "gelu", "dropout": 0.25, "seed": 5, "scale": 0.5}),
    Case("dropout-gate", _packed(70, 50, 40), {"activation": "swiglu", "dropout": 0.5, "seed": 1 << 40,
         "return_preactivation": True}, present=("residual",)),
    Case("dropout-batch", _axes(17, 13, 16, (2,), (2,)), {"dropout": 0.1, "seed": 3}, layout="padded"),
    Case("out", _SMALL, {"activation": "silu"}, present=("bias", "out"), gradients=False),
    Case("out-padded", _axes(20, 24, 16, (2,), (2,)), {"return_preactivation": True}, present=("residual", "out"),
         layout="padded", gradients=False),
    Case("out-transposed", _SMALL, present=("out",), layout="transposed", gradients=False),
    Case("out-added", _axes(70, 50, 40), {"accumulate": True}, present=("out",), gradients=False),
    Case("out-added-float32", _axes(33, 24, 40, (2,), (2,)), {"accumulate": True, "scale": 0.5}, present=("out",),
         gradients=False, dtype_of={"out": torch.float32}),
    _quantized("fp8-out", _axes(33, 48, 64), out_dtype=FP8),
    _quantized("fp8-out-row", {**_axes(33, 24, 40), "out_scales": (33, 1)}, ("bias", "residual"), out_dtype=FP8),
    _quantized("fp8-out-batch", {**_axes(17, 20, 16, (2,), (2,)), "out_scales": (2, 17, 1)}, activation="silu",
               out_dtype=FP8),
    _quantized("fp8-out-blocks", _axes(33, 300, 40), ("bias",), out_quantize="block"),
    _quantized("fp8-out-blocks-batch", _axes(20, 130, 16, (3,)), ("residual",), out_quantize="block"),
    _quantized("fp8-out-blocks-gate", _packed(33, 140, 40), activation="reglu", out_quantize="block",
               return_preactivation=True),
    _quantized("fp8-out-rows", _axes(33, 70, 40), ("bias",), out_quantize="row"),
    _quantized("fp8-out-rows-gate", _packed(17, 30, 16, (2,), (2,)), activation="swiglu", out_quantize="row"),
    _quantized("fp8-out-no-columns", _axes(5, 0, 8), out_quantize="row"),
    _scaled("fp8-tensor", FP8, _axes(33, 48, 64), "tensor"),
    _scaled("fp8-row", FP8, _axes(33, 48, 80), "row", activation="silu"),
    _scaled("fp8-batch", FP8, _axes(17, 20, 32, (2,), (2,)), "batch", out_dtype=torch.float32),
    _scaled("fp8-block", FP8, _axes(20, 140, 300), "block"),
    _scaled("int8-tensor", torch.int8, _axes(33, 48, 64), "tensor"),
    _scaled("int8-row", torch.int8, _axes(17, 20, 50), "row", out_dtype=torch.float32),
    _scaled("fp8-gate", FP8, _packed(33, 48, 80), "row", activation="swiglu", return_preactivation=True),
    _scaled("fp8-gate-interleaved", FP8, _packed(33, 24, 64), "row", activation="swiglu", packed="interleaved"),
    _scaled("fp8-gate-block", FP8, _packed(20, 128, 300), "block", activation="swiglu"),
    _scaled("fp8-gate-block-interleaved", FP8, _packed(9, 80, 200), "block", activation="geglu", packed="interleaved"),
    _scaled("int8-gate", torch.int8, _packed(17, 20, 50), "tensor", activation="swiglu"),
)  # fmt: skip


def _random_case(rng: Rng, case: Case) -> Case:
    """Batches that fit, scales for 8-bit operands only, and no gradients where rounding may cross a kink."""
    axes, options, present = dict(case.axes), dict(case.options), list(case.present)
    batch = rng.call.choice((1, 2, 3))
    left, right = rng.one((((), ()), ((), ()), ((batch,), (batch,)), ((batch,), ()), ((1,), (batch,)), ((), (batch,))))
    axes |= {"a_batch": left, "b_batch": right, "c_batch": _axes(1, 1, 1, left, right)["c_batch"]}
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
        axes |= _scale_axes(axes, rng.one(("tensor", "row", "batch", "block")))
    kinked = options.get("activation") in ("relu", "reglu", "gpt_oss_glu") or isinstance(
        options.get("activation"), Gate
    )
    return replace(case, axes=axes, options=options, present=tuple(present), dtype_of=dtype_of,
                   gradients=not eight_bits and not (kinked and case.dtypes[0] != torch.float32)
                   and "out" not in present and not quantizes,
                   through=_tensor_core_dtype(case.dtype_of.get("a", torch.float32), options))  # fmt: skip


def _bench(name: str, m: int, n: int, k: int, present: tuple[str, ...] = (), **options: Any) -> Case:
    """The weight is (N, K), as in torch.nn.Linear."""
    small = {"m": min(m, 512), "n": min(n, 512), "k": min(k, 1024)}
    return Case(name, _axes(m, n, k), options, dtypes=_HALF, present=present, layout_of={"b": "transposed"},
                check_axes=small)  # fmt: skip


def _gated_bench(name: str, m: int, n: int, k: int, present: tuple[str, ...] = (), **options: Any) -> Case:
    """Gate and up in one weight (2 N, K)."""
    case = _bench(name, m, n, k, present, **options)
    return replace(case, axes={**case.axes, "b_parts": 2})


# Models whose projections are timed, by the name that their cases have.
_PROJECTED = {
    "llama-1b": MODELS["llama-3.2-1b"], "llama-8b": MODELS["llama-3.1-8b"], "llama-70b": MODELS["llama-3.1-70b"],
    "gpt-oss": MODELS["gpt-oss-20b"],
}  # fmt: skip


def _projections(name: str) -> dict[str, tuple[int, int]]:
    """(N, K) of a model's projections; gpt-oss has experts in the place of the MLP's."""
    model = _PROJECTED[name]
    heads, kv_heads = model.heads * model.head_dim, model.kv_heads * model.head_dim
    found = {"qkv": (heads + 2 * kv_heads, model.hidden), "o": (model.hidden, heads)}
    if name != "gpt-oss":
        found |= {"gate-up": (2 * model.intermediate, model.hidden), "down": (model.hidden, model.intermediate)}
    return found


def _scaled_bench(name: str, kind: str, m: int, n: int, k: int) -> Case:
    small = _axes(512, 512, 1024)
    return replace(
        _scaled(f"fp8-{kind}-{name}", FP8, _axes(m, n, k), kind), dtypes=_HALF, layout_of={"b": "transposed"},
        check_axes={"m": 512, "n": 512, "k": 1024, **_scale_axes(small, kind)},
    )  # fmt: skip


def _benches() -> tuple[Case, ...]:
    """Squares, the projections of models over 512 to 16,384 rows, GeLU after the up projection, and FP8."""
    llama, gpt_oss, gpt2 = _PROJECTED["llama-8b"], _PROJECTED["gpt-oss"], MODELS["gpt2"]
    gelu = {"llama-8b": llama, "llama-1b": _PROJECTED["llama-1b"], "gpt2": gpt2}
    swiglu = _packed(8192, llama.intermediate, llama.hidden)
    large = {"8192x8192x8192": (8192, 8192, 8192), "4096x4096x4096": (4096, 4096, 4096)} | {
        f"llama-8b-{layer}-4096": (4096, n, k) for layer, (n, k) in _projections("llama-8b").items()
    }
    return (
        *(_bench(f"{size}x{size}x{size}", size, size, size) for size in (4096, 8192)),
        *(_bench(f"{model}-{layer}-{rows}", rows, n, k) for model in _PROJECTED
          for layer, (n, k) in _projections(model).items() for rows in (512, 4096, 16384)),
        *(_bench(f"{name}-gelu-{rows}", rows, model.intermediate, model.hidden, ("bias",), activation="gelu_tanh")
          for name, model in gelu.items() for rows in (4096, 16384)),
        Case("llama-8b-swiglu-8192", swiglu, {"activation": "swiglu"}, dtypes=_HALF, layout_of={"b": "transposed"},
             check_axes=_packed(512, 512, 1024)),
        _bench("gpt-oss-o-bias-residual-4096", 4096, gpt_oss.hidden, gpt_oss.heads * gpt_oss.head_dim,
               ("bias", "residual")),
        *(_gated_bench(f"llama-8b-swiglu-{rows}", rows, llama.intermediate, llama.hidden, activation="swiglu")
          for rows in (512, 4096, 16384)),
        _gated_bench("llama-8b-swiglu-z-16384", 16384, llama.intermediate, llama.hidden, activation="swiglu",
                     return_preactivation=True),
        _gated_bench("gpt-oss-glu-4096", 4096, gpt_oss.hidden, gpt_oss.hidden, ("bias",), activation="gpt_oss_glu",
                     packed="interleaved"),
        replace(_bench("llama-8b-down-added-16384", llama.hidden, llama.intermediate, 16384, ("out",), accumulate=True),
                layout_of={"a": "transposed"}, dtype_of={"out": torch.float32}, gradients=False),
        *(_scaled_bench(name, kind, *sizes) for name, sizes in large.items() for kind in ("tensor", "row", "block")),
    )  # fmt: skip


def _cost(case: Case, dtype: torch.dtype) -> Mapping[str, Cost]:
    """Every operand is read once and the output written once."""
    axes, each = case.axes, case.dtype_of.get("a", dtype).itemsize
    batch, m, n, k = count(axes["c_batch"]), axes["m"], axes["n"], axes["k"]
    products = n * activation_width(case.options.get("activation"))
    moved = (count(axes["a_batch"]) * m * k + count(axes["b_batch"]) * k * products) * each
    moved += batch * m * n * dtype.itemsize * (2 if "residual" in case.present else 1)
    flops = 2.0 * batch * m * products * k
    return {"fwd": Cost(flops, moved), "bwd": Cost(2 * flops, 2 * moved)}


def _written(given: Mapping[str, Any]) -> tuple[Tensor, ...]:
    return (given["out"],) if "out" in given else ()


MATMUL = declare(
    _ROOM,
    "matmul",
    "matrix products, batched and scaled, with bias, activation and residual",
    backward=None,  # the gradients are products of the same kernels
    function=f"{_ROOM}.named:matmul",
    reference=f"{_ROOM}.named:reference",
    inputs=_INPUTS,
    written=_written,
    kernels=(
        backends.hopper(
            f"{_ROOM}.hopper", _hopper, (torch.bfloat16, torch.float16, FP8, torch.int8), _cublas_is_faster
        ),
        replace(
            backends.triton(f"{_ROOM}.triton", _triton, dtypes=(*FLOATS, FP8, torch.int8), min_arch=80),
            deprioritised=_cublas_is_faster,
        ),
    ),
    workload=Workload(_CASES, _benches(), _cost),
    ranges={"m": (0, 70, 1), "n": (0, 70, 1), "k": (0, 90, 1)},
    random_case=_random_case,
    random_share=3,
    sum_length=lambda case: case.axes["k"],
    baselines=(
        "eager",
        "compile",
        Baseline("max_autotune", f"{_ROOM}.baselines:max_autotune", forward_only=True),
        Baseline("addmm_activation", f"{_ROOM}.baselines:addmm_activation", forward_only=True),
    ),
)


class _Preactivation(Input):
    """n columns, or those of gate and up: an axis "z_parts" says how many times n."""

    def shape(self, axes: Axes) -> tuple[int, ...]:
        return super().shape({**axes, "n": axes["n"] * axes["z_parts"]})


def _dact(m: int, n: int, k: int, activation: Any, *batches: tuple[int, ...], **options: Any) -> dict[str, Any]:
    """Axes and options of a product with an activation's gradient."""
    return {
        "axes": {**_axes(m, n, k, *batches), "z_parts": activation_width(activation)},
        "options": {"activation": activation, **options},
    }


_DACT_CASES = (
    *(Case(kind.replace("_", "-"), **_dact(33, 24, 40, kind)) for kind in ACTIVATIONS),
    *(Case(f"{kind.replace('_', '-')}-{packed}", **_dact(33, 24, 40, kind, packed=packed))
      for kind, packed in zip(GATES, ("interleaved", "halves") * 3)),
    Case("tiles", **_dact(70, 90, 100, "swiglu")),
    Case("tiles-interleaved", **_dact(70, 90, 100, "swiglu", packed="interleaved")),
    Case("odd", **_dact(17, 13, 7, "geglu")),
    Case("gate-object", **_dact(17, 20, 16, Gate("gpt_oss", 1.5, 5.0), packed="interleaved")),
    Case("weight", **_dact(40, 48, 64, "swiglu"), layout_of={"b": "transposed"}),
    Case("batch", **_dact(20, 24, 16, "gelu", (3,), (3,))),
    Case("batch-of-a", **_dact(20, 24, 16, "swiglu", (3,))),
    Case("batch-of-b", **_dact(20, 24, 16, "silu", (1,), (2,))),
    Case("padded", **_dact(20, 24, 16, "swiglu", (2,), (1,)), layout="padded"),
    Case("transposed", **_dact(33, 24, 40, "gelu_tanh"), layout="transposed"),
    Case("out", **_dact(33, 24, 40, "gelu"), present=("dz_out",)),
    Case("out-padded", **_dact(33, 24, 40, "swiglu", packed="interleaved"), present=("dz_out",), layout="padded"),
    Case("in-place", **_dact(33, 24, 40, "silu", in_place=True)),
    Case("in-place-gate", **_dact(20, 24, 16, "swiglu", (2,), in_place=True)),
    Case("in-place-strided", **_dact(33, 24, 40, "geglu", packed="interleaved", in_place=True), layout="transposed"),
    Case("float32-z", **_dact(33, 24, 40, "swiglu"), dtypes=(torch.float16, torch.bfloat16),
         dtype_of={"preactivation": torch.float32}),
    Case("no-rows", **_dact(0, 24, 40, "swiglu")),
    Case("no-columns", **_dact(33, 0, 40, "silu")),
    Case("no-k", **_dact(5, 24, 0, "swiglu")),
)  # fmt: skip


def _random_dact(rng: Rng, case: Case) -> Case:
    options = {name: value for name, value in case.options.items() if name in ("activation", "packed")}
    options.setdefault("activation", rng.one((*ACTIVATIONS, *GATES)))
    case = _random_case(rng, replace(case, options=options, present=(), dtype_of={}))
    axes = {**case.axes, "z_parts": activation_width(case.options["activation"])}
    in_place = rng.maybe(0.3)
    options = {**case.options, "in_place": True} if in_place else dict(case.options)
    return replace(case, axes=axes, options=options, present=("dz_out",) if not in_place and rng.maybe(0.3) else ())


def _dact_cost(case: Case, dtype: torch.dtype) -> Mapping[str, Cost]:
    """Z is read; dZ and the activation are written."""
    axes = case.axes
    batch, m, n, k = count(axes["c_batch"]), axes["m"], axes["n"], axes["k"]
    moved = count(axes["a_batch"]) * m * k + count(axes["b_batch"]) * k * n + batch * m * n * (2 * axes["z_parts"] + 1)
    return {"fwd": Cost(2.0 * batch * m * n * k, moved * dtype.itemsize)}


def _dact_benches() -> tuple[Case, ...]:
    llama = MODELS["llama-3.1-8b"]
    small = {"m": 512, "n": 512, "k": 1024}
    return tuple(
        Case(f"llama-8b-{kind.replace('_', '-')}-{rows}", **_dact(rows, llama.intermediate, llama.hidden, kind),
             dtypes=_HALF, check_axes=small)
        for kind in ("gelu_tanh", "swiglu") for rows in (4096, 16384)
    )  # fmt: skip


def _dact_written(given: Mapping[str, Any]) -> tuple[Tensor, ...]:
    if given.get("in_place"):
        return (given["preactivation"],)
    return (given["dz_out"],) if "dz_out" in given else ()


MATMUL_DACT = declare(
    _ROOM,
    "matmul_dact",
    "a matrix product with an activation's gradient in its epilogue",
    function=f"{_ROOM}.named:matmul_dact",
    reference=f"{_ROOM}.named:reference_dact",
    inputs={
        "a": Input(("*a_batch", "m", "k")),
        "b": Input(("*b_batch", "k", "n"), draw=normal(0.1)),
        "preactivation": _Preactivation(("*c_batch", "m", "n")),
        "dz_out": _Preactivation(("*c_batch", "m", "n"), optional=True),
    },
    kernels=(
        backends.hopper(f"{_ROOM}.hopper", dtypes=(torch.bfloat16, torch.float16)),
        backends.triton(f"{_ROOM}.triton", min_arch=80),
    ),
    differentiable=False,
    written=_dact_written,
    workload=Workload(_DACT_CASES, _dact_benches(), _dact_cost),
    ranges={"m": (0, 70, 1), "n": (0, 70, 1), "k": (0, 90, 1)},
    random_case=_random_dact,
    baselines=(Baseline("eager", f"{_ROOM}.baselines:eager_dact"),),
)


OPS = (MATMUL, MATMUL_DACT, GROUPED_MATMUL, GROUPED_WEIGHT_GRADIENT)
