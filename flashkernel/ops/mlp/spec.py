"""The declaration of the MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks.epilogue import ACTIVATIONS, GATES
from flashkernel.blocks.fp8 import FP8
from flashkernel.blocks.weight import scales_shape
from flashkernel.core import backends
from flashkernel.core.declare import Workload, declare
from flashkernel.core.device import Device
from flashkernel.core.op import FLOATS, Axes, Call, Case, Cost, Input, Tolerance, costs, count, normal
from flashkernel.core.random_case import Rng
from flashkernel.core.shapes import MODELS
from flashkernel.ops.mlp.configs import FEW_ROWS

_PACKAGE = "flashkernel.ops.mlp"
PRODUCTS = f"{_PACKAGE}.products"  # the only module of kernel calls
_HALF = (torch.bfloat16,)
_FEW, _MANY = f"1 to {FEW_ROWS}", f"over {FEW_ROWS}"


def few(rows: int) -> bool:
    """Whether the kernels for few rows serve a call."""
    return rows <= FEW_ROWS


def row_class(rows: int) -> str:
    """All that the choice of a backend asks of the number of rows."""
    return _FEW if few(rows) else _MANY


def linear_backends(requested: str | None, rows: int) -> tuple[str | None, str | None]:
    """The backends of the two calls of `linear` that make up a call on a requested one.

    Few rows have no kernels of Hopper's own, and the second product of many rows has no activation: `linear` chooses.
    """
    if few(rows):
        return (None, None) if requested == "hopper" else (requested, requested)
    return requested, None


def _by_linear(call: Call) -> bool:
    """Whether it is two calls of `linear`, each with a choice of its own."""
    return (call.facts["rows"] == _FEW and not call.gradients) or call.facts["weight"] != "plain"


def _hopper(call: Call) -> str | None:
    if _by_linear(call):
        return f"up to {FEW_ROWS} rows without gradients, and quantized weights, have kernels of their own in linear"
    return None


def unfused(device: Device) -> bool:
    """Whether the activation is a kernel of its own: Triton's products need tensor cores, from sm_80 on."""
    return device.kind == "cuda" and device.arch < 80


def _triton(call: Call) -> str | None:
    if unfused(call.device) and _by_linear(call) and call.facts["weight"] == "plain":
        return "before sm_80 few rows without gradients are served by CUDA C++"
    return None


def _cuda(call: Call) -> str | None:
    if call.facts["rows"] != _FEW or call.facts["weight"] != "plain":
        return f"its kernels are those of linear, for up to {FEW_ROWS} rows and plain weights"
    return None


def _cublas_is_faster(call: Call) -> str | None:
    if call.dtype == torch.float32 and not _by_linear(call):
        return "cuBLAS serves float32 products better"
    return None


def _triton_is_faster(call: Call) -> str | None:
    return "Triton's kernels serve few rows from sm_80 on" if call.device.arch >= 80 else None


class _Input(Input):
    """An axis "wide" is "inner", or twice that where "packed" says that gate and up are in one."""

    def shape(self, axes: Axes) -> tuple[int, ...]:
        return super().shape({**axes, "wide": axes["inner"] * (2 if axes["packed"] else 1)})


class _Scales(_Input):
    """Scales of a weight in fp8; the axis "scales" says what shares one."""

    def shape(self, axes: Axes) -> tuple[int, ...]:
        return scales_shape(super().shape(axes), axes["scales"])


def _positive(shape: tuple[int, ...], axes: Axes, generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator, device=generator.device) * 0.4 + 0.1


def _scales(rows: str, columns: str) -> Input:
    return _Scales((rows, columns), dtype=torch.float32, draw=_positive, grad=False, optional=True)


_WEIGHT = normal(0.1)
_INPUTS = {
    "x": Input(("*rows", "columns")),
    "gate_up": _Input(("wide", "columns"), draw=_WEIGHT),
    "down": Input(("outputs", "inner"), draw=normal(0.05)),  # float16's limit is for outputs of order one
    "up": _Input(("wide", "columns"), draw=_WEIGHT, optional=True),
    "gate_up_bias": _Input(("wide",), optional=True),
    "up_bias": _Input(("wide",), optional=True),
    "down_bias": Input(("outputs",), optional=True),
    "residual": Input(("*rows", "outputs"), optional=True),
    "norm_weight": Input(("columns",), draw=normal(0.3, 0.5), optional=True),
    "gate_up_scales": _scales("wide", "columns"),
    "up_scales": _scales("wide", "columns"),
    "down_scales": _scales("outputs", "inner"),
}
_PAIR_BIASES = ("up", "gate_up_bias", "up_bias", "down_bias")


def _axes(rows: Any, columns: int, inner: int, outputs: int, packed: bool) -> dict[str, Any]:
    return {"rows": rows, "columns": columns, "inner": inner, "outputs": outputs, "packed": packed}


def _case(
    name: str, present: tuple[str, ...] = (), rows: Any = 70, sizes: tuple[int, int, int] = (40, 24, 33), **options: Any
) -> Case:
    gated = options.get("activation", "swiglu") in GATES
    return Case(name, _axes(rows, *sizes, gated and "up" not in present), options, present=present)


def _fp8(name: str, scales: str, present: tuple[str, ...] = (), rows: Any = 3, **options: Any) -> Case:
    """A case with all weights in fp8; `present` names no scales."""
    weights = ("gate_up", "down", *(("up",) if "up" in present else ()))
    case = _case(name, (*present, *(f"{one}_scales" for one in weights)), rows, **options)
    return replace(case, axes={**case.axes, "scales": scales}, dtype_of=dict.fromkeys(weights, FP8))


_CASES = (
    _case("packed"),
    _case("pair", ("up",)),
    _case("pair-interleaved", _PAIR_BIASES, packed="interleaved"),  # of one weight; a pair is apart all the same
    _case("one-row", ("up",), ()),
    _case("few-rows", ("residual", "norm_weight"), (2, 3)),
    _case("most-few-rows", ("up", "residual"), 64),
    _case("many-rows", ("up", "residual", "norm_weight"), (3, 43)),
    _case("pair-biases", _PAIR_BIASES, activation="geglu"),
    _case("everything", (*_PAIR_BIASES, "residual", "norm_weight"), activation="gpt_oss_glu", norm_eps=1e-3),
    _case("packed-biases", ("gate_up_bias", "down_bias", "residual"), activation="geglu_exact"),
    _case("gpt-oss", ("gate_up_bias", "down_bias"), packed="interleaved", activation="gpt_oss_glu"),
    _case("interleaved", ("residual",), packed="interleaved"),
    _case("gpt2", ("gate_up_bias", "down_bias", "residual"), activation="gelu_tanh"),
    _case("gelu", activation="gelu"),
    _case("silu", ("down_bias",), activation="silu"),
    _case("relu", activation="relu"),
    _case("squared-relu", ("gate_up_bias",), activation="squared_relu"),
    _case("reglu", ("up",), activation="reglu"),
    _case("recompute", _PAIR_BIASES, recompute=True),
    _case("recompute-packed", ("gate_up_bias",), recompute=True, activation="gelu"),
    _case("norm", ("up", "norm_weight"), norm_offset=0.5, norm_eps=1e-3),
    _case("odd", ("residual",), 67, (37, 13, 19)),
    _case("wider-than-a-tile", ("up",), 130, (72, 136, 40)),
    Case("float32-extras", _axes(65, 40, 24, 33, True), present=("gate_up_bias", "down_bias", "residual"),
         dtypes=(torch.float16, torch.bfloat16),
         dtype_of=dict.fromkeys(("gate_up_bias", "down_bias", "residual"), torch.float32)),
    Case("padded", _axes((5, 14), 40, 24, 33, False), present=("up", "residual"), layout="padded"),
    Case("transposed", _axes((6, 12), 40, 24, 33, True), present=("residual", "down_bias"), layout="transposed"),
    _case("no-rows", ("gate_up_bias", "down_bias"), (0, 3)),
    _case("no-inner", ("down_bias",), 66, (40, 0, 33)),
    _case("no-outputs", (), 66, (40, 24, 0)),
    _case("one-element", ("up",), 1, (1, 1, 1)),
    _fp8("fp8-row", "row", ("residual",)),
    _fp8("fp8-pair", "tensor", ("up", "down_bias"), rows=9),
    _fp8("fp8-many-rows", "row", ("up",), rows=65, activation="geglu"),
    _fp8("fp8-block", "block", rows=66),
)  # fmt: skip


def _random_case(rng: Rng, case: Case) -> Case:
    """Gate and up in one or apart, or one weight; biases for all of them or none."""
    options = {name: value for name, value in case.options.items() if name not in ("activation", "packed")}
    axes = dict(case.axes)
    if not rng.empty():
        sizes = (1, 2, 9, 65, 130) if rng.large else (1, 2, 9, 65)
        axes["rows"] = (*((2,) if rng.maybe(0.2) else ()), rng.call.choice(sizes))
    kind = rng.one(("packed", "pair", "plain"))
    options["activation"] = rng.one(ACTIVATIONS if kind == "plain" else tuple(GATES))
    axes["packed"] = kind == "packed"
    options["packed"] = rng.one(("halves", "interleaved"))
    present: list[str] = [name for name in ("down_bias", "residual") if name in case.present]
    present += ["norm_weight"] if "norm_weight" in case.present and axes["columns"] else []
    present += ["up"] if kind == "pair" else []
    if "gate_up_bias" in case.present:
        present += ["gate_up_bias", *(["up_bias"] if kind == "pair" else [])]
    dtype_of = {name: dtype for name, dtype in case.dtype_of.items() if name in present and dtype != FP8}
    # Where a product lies so near to a kink that rounding takes it across, its gradient is another one.
    kinked = options["activation"] in ("relu", "reglu", "gpt_oss_glu") and case.dtypes[0] != torch.float32
    return replace(case, axes=axes, options=options, present=tuple(present), dtype_of=dtype_of, gradients=not kinked)


def _bench(name: str, model: str, rows: int, present: tuple[str, ...], gradients: bool = True, **options: Any) -> Case:
    sizes = MODELS[model]
    packed_weight = options.get("activation", "swiglu") in GATES and "up" not in present
    axes = _axes(rows, sizes.hidden, sizes.intermediate, sizes.hidden, packed_weight)
    small = _axes(min(rows, 256), 256, 512, 256, packed_weight)
    return Case(name, axes, options, dtypes=_HALF, present=present, check_axes=small, gradients=gradients)


_GPT2 = ("gate_up_bias", "down_bias")
_BENCHES = (
    _bench("llama-8b-8192", "llama-3.1-8b", 8192, ()),
    _bench("llama-8b-8192-pair", "llama-3.1-8b", 8192, ("up",)),
    _bench("llama-8b-8192-step", "llama-3.1-8b", 8192, ()),
    _bench("llama-8b-8192-pair-step", "llama-3.1-8b", 8192, ("up",)),
    _bench("llama-8b-8192-recompute-step", "llama-3.1-8b", 8192, (), recompute=True),
    _bench("llama-1b-8192", "llama-3.2-1b", 8192, ()),
    _bench("llama-1b-16384", "llama-3.2-1b", 16384, ()),
    _bench("qwen3-8b-8192", "qwen3-8b", 8192, ()),
    _bench("gpt2-16384", "gpt2", 16384, _GPT2, activation="gelu_tanh"),
    _bench("gpt2-16384-step", "gpt2", 16384, _GPT2, activation="gelu_tanh"),
    _bench("gpt-oss-8192", "gpt-oss-20b", 8192, _GPT2, activation="gpt_oss_glu", packed="interleaved"),
    _bench("llama-8b-512", "llama-3.1-8b", 512, (), gradients=False),
    *(_bench(f"llama-8b-{rows}", "llama-3.1-8b", rows, ("up", "residual", "norm_weight"), gradients=False)
      for rows in (1, 16, 64)),
)  # fmt: skip


def _cost(case: Case, dtype: torch.dtype) -> Mapping[str, Cost]:
    """Products of up (with its gate) and down; every weight and activation is moved once.

    The backward pass has twice the products of the forward pass, and reads what that stored for it. Cases named as
    steps are timed forward and backward in one, which is how memory is used in training.
    """
    axes, rows = case.axes, count(case.axes["rows"])
    wide = axes["inner"] * (2 if axes["packed"] or "up" in case.present else 1)
    weights = wide * axes["columns"] + axes["inner"] * axes["outputs"]
    moved = weights + rows * (axes["columns"] + axes["inner"] + axes["outputs"])
    flops = 2.0 * rows * weights
    again = 2.0 * rows * wide * axes["columns"] if case.options.get("recompute") else 0.0
    forward = Cost(flops, (moved + rows * (wide if case.gradients else 0)) * dtype.itemsize)
    backward = Cost(2 * flops + again, (2 * moved + 2 * rows * wide) * dtype.itemsize)
    return costs(case, forward, backward)


MLP = declare(
    _PACKAGE,
    "mlp",
    "up, gate, activation and down of a transformer's MLP, with norm, biases and residual",
    function=f"{_PACKAGE}.named:mlp",
    reference=f"{_PACKAGE}.named:reference",
    inputs=_INPUTS,
    kernels=(
        backends.hopper(PRODUCTS, _hopper),
        replace(
            backends.triton(PRODUCTS, _triton, dtypes=FLOATS), deprioritized=_cublas_is_faster
        ),
        backends.cuda(
            PRODUCTS, _cuda, dtypes=(torch.float16, torch.bfloat16), auto_devices=("cuda",),
            deprioritized=_triton_is_faster,
        ),
    ),
    workload=Workload(_CASES, _BENCHES, _cost),
    ranges={"rows": (0, 5, 1), "columns": (1, 60, 1), "inner": (1, 50, 1), "outputs": (1, 40, 1)},
    random_case=_random_case,
    random_share=3,
    tolerance=Tolerance(of_inputs="all"),
    baselines=("eager", "compile", "liger"),
)  # fmt: skip
OPS = (MLP,)
