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
from flashkernel.ops.matmul.cases import CASES, axes_of, gated_axes, random_case, resized, scale_axes, scaled
from flashkernel.ops.matmul.grouped.spec import (
    GROUPED_MATMUL,
    GROUPED_WEIGHT_GRADIENT,
    eight_bit_gradients,
    triton_operands,
)

_PACKAGE = "flashkernel.ops.matmul"
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
        return "cuBLAS serves products with no more than a bias better"
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


def _bench(name: str, m: int, n: int, k: int, present: tuple[str, ...] = (), **options: Any) -> Case:
    """The weight is (N, K), as in torch.nn.Linear."""
    small = {"m": min(m, 512), "n": min(n, 512), "k": min(k, 1024)}
    return Case(name, axes_of(m, n, k), options, dtypes=_HALF, present=present, layout_of={"b": "transposed"},
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
    small = axes_of(512, 512, 1024)
    return replace(
        scaled(f"fp8-{kind}-{name}", FP8, axes_of(m, n, k), kind), dtypes=_HALF, layout_of={"b": "transposed"},
        check_axes={"m": 512, "n": 512, "k": 1024, **scale_axes(small, kind)},
    )  # fmt: skip


def _benches() -> tuple[Case, ...]:
    """Squares, the projections of models over 512 to 16,384 rows, GeLU after the up projection, and FP8."""
    llama, gpt_oss, gpt2 = _PROJECTED["llama-8b"], _PROJECTED["gpt-oss"], MODELS["gpt2"]
    gelu = {"llama-8b": llama, "llama-1b": _PROJECTED["llama-1b"], "gpt2": gpt2}
    swiglu = gated_axes(8192, llama.intermediate, llama.hidden)
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
             check_axes=gated_axes(512, 512, 1024)),
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
    _PACKAGE,
    "matmul",
    "matrix products, batched and scaled, with bias, activation and residual",
    backward=None,  # the gradients are products of the same kernels
    function=f"{_PACKAGE}.named:matmul",
    reference=f"{_PACKAGE}.named:reference",
    inputs=_INPUTS,
    written=_written,
    kernels=(
        backends.hopper(
            f"{_PACKAGE}.hopper", _hopper, (torch.bfloat16, torch.float16, FP8, torch.int8), _cublas_is_faster
        ),
        replace(
            backends.triton(f"{_PACKAGE}.triton", _triton, dtypes=(*FLOATS, FP8, torch.int8), min_arch=80),
            deprioritized=_cublas_is_faster,
        ),
    ),
    workload=Workload(CASES, _benches(), _cost),
    ranges={"m": (0, 70, 1), "n": (0, 70, 1), "k": (0, 90, 1)},
    resized=resized,
    random_case=random_case,
    random_share=3,
    sum_length=lambda case: case.axes["k"],
    baselines=(
        "eager",
        "compile",
        Baseline("max_autotune", f"{_PACKAGE}.baselines:max_autotune", forward_only=True),
        Baseline("addmm_activation", f"{_PACKAGE}.baselines:addmm_activation", forward_only=True),
    ),
)


class _Preactivation(Input):
    """n columns, or those of gate and up: an axis "z_parts" says how many times n."""

    def shape(self, axes: Axes) -> tuple[int, ...]:
        return super().shape({**axes, "n": axes["n"] * axes["z_parts"]})


def _dact(m: int, n: int, k: int, activation: Any, *batches: tuple[int, ...], **options: Any) -> dict[str, Any]:
    """Axes and options of a product with an activation's gradient."""
    return {
        "axes": {**axes_of(m, n, k, *batches), "z_parts": activation_width(activation)},
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
    case = random_case(rng, replace(case, options=options, present=(), dtype_of={}))
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
    _PACKAGE,
    "matmul_dact",
    "a matrix product with an activation's gradient in its epilogue",
    function=f"{_PACKAGE}.named:matmul_dact",
    reference=f"{_PACKAGE}.named:reference_dact",
    inputs={
        "a": Input(("*a_batch", "m", "k")),
        "b": Input(("*b_batch", "k", "n"), draw=normal(0.1)),
        "preactivation": _Preactivation(("*c_batch", "m", "n")),
        "dz_out": _Preactivation(("*c_batch", "m", "n"), optional=True),
    },
    kernels=(
        backends.hopper(f"{_PACKAGE}.hopper", dtypes=(torch.bfloat16, torch.float16)),
        backends.triton(f"{_PACKAGE}.triton", min_arch=80),
    ),
    differentiable=False,
    written=_dact_written,
    workload=Workload(_DACT_CASES, _dact_benches(), _dact_cost),
    ranges={"m": (0, 70, 1), "n": (0, 70, 1), "k": (0, 90, 1)},
    resized=resized,
    random_case=_random_dact,
    baselines=(Baseline("eager", f"{_PACKAGE}.baselines:eager_dact"),),
)


OPS = (MATMUL, MATMUL_DACT, GROUPED_MATMUL, GROUPED_WEIGHT_GRADIENT)
