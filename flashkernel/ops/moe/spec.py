"""The declarations of a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks.epilogue import ACTIVATIONS, GATES
from flashkernel.blocks.gate_up import PACKINGS
from flashkernel.core import backends
from flashkernel.core.declare import Workload, declare
from flashkernel.core.op import FLOATS, Axes, Baseline, Case, Cost, Input, Tolerance, costs, normal
from flashkernel.core.random_case import Rng
from flashkernel.core.shapes import MODELS
from flashkernel.ops.moe import support
from flashkernel.ops.moe.routing.spec import MOE_ROUTE, MOE_SORT

_PACKAGE = "flashkernel.ops.moe"
PRODUCTS = f"{_PACKAGE}.products"  # the only module of kernel calls


class _GateUp(Input):
    """Twice as wide as the experts' inner width where the activation has a gate."""

    def shape(self, axes: Axes) -> tuple[int, ...]:
        wide = axes["inner"] * (2 if axes["gated"] else 1)
        return tuple(wide if dim == "wide" else axes[dim] for dim in self.dims)


def _weights(shape: tuple[int, ...], axes: Axes, generator: torch.Generator) -> Tensor:
    """Routing weights of a token, which sum to 1."""
    return torch.rand(shape, generator=generator, device=generator.device).add(0.1).softmax(1)


def _chosen(shape: tuple[int, ...], axes: Axes, generator: torch.Generator) -> Tensor:
    """Different experts for each token; a share "unused" of the slots has none. A skewed choice, as routers make."""
    if shape[1] > axes["num_experts"]:
        raise ValueError(f"{shape[1]} slots of a token for {axes['num_experts']} experts; they must be different ones")
    popularity = torch.randn((1, axes["num_experts"]), generator=generator, device=generator.device)
    keys = torch.rand((shape[0], axes["num_experts"]), generator=generator, device=generator.device)
    chosen = (popularity - torch.log(-torch.log(keys.clamp(1e-9, 1 - 1e-6)))).argsort(1, descending=True)[:, : shape[1]]
    unused = torch.rand(shape, generator=generator, device=generator.device) < axes["unused"]
    return torch.where(unused, -1, chosen)


_INPUTS = {
    "x": Input(("tokens", "hidden")),
    "gate_up": _GateUp(("num_experts", "wide", "hidden"), draw=normal(0.1)),
    "down": Input(("num_experts", "hidden", "inner"), draw=normal(0.05)),  # float16's limit is for outputs of order one
    "experts": Input(("tokens", "slots"), torch.int32, _chosen, grad=False),
    "weights": Input(("tokens", "slots"), torch.float32, _weights),
    "gate_up_bias": _GateUp(("num_experts", "wide"), draw=normal(0.3), optional=True),
    "down_bias": Input(("num_experts", "hidden"), draw=normal(0.3), optional=True),
}
_BOTH = (torch.float32, torch.bfloat16)  # Triton's kernels alone, and Hopper's
_BIASES = ("gate_up_bias", "down_bias")


def _axes(
    tokens: int, experts: int, hidden: int, inner: int, slots: int, gated: bool = True, unused: float = 0.0
) -> dict[str, Any]:
    return {"tokens": tokens, "num_experts": experts, "hidden": hidden, "inner": inner, "slots": slots, "gated": gated,
            "unused": unused}  # fmt: skip


def _case(
    name: str, tokens: int, experts: int, hidden: int, inner: int, slots: int, *present: str,
    layout: str = "contiguous", unused: float = 0.0, dtypes: tuple[torch.dtype, ...] = FLOATS[:1], **options: Any,
) -> Case:  # fmt: skip
    gated = options.get("activation", "swiglu") in GATES
    axes = _axes(tokens, experts, hidden, inner, slots, gated, unused)
    return Case(name, axes, options, dtypes, present=present, layout=layout)


_CASES = (
    _case("mixtral", 40, 4, 24, 20, 2, dtypes=FLOATS),
    _case("gpt-oss", 40, 6, 24, 20, 3, *_BIASES, activation="gpt_oss_glu", packed="interleaved", dtypes=_BOTH),
    _case("one-token", 1, 8, 32, 16, 2),
    _case("few-tokens", 9, 8, 40, 24, 2, *_BIASES, packed="interleaved"),
    _case("one-expert", 33, 1, 24, 16, 1, "down_bias"),
    _case("all-experts", 12, 3, 16, 24, 3),
    _case("mostly-empty", 5, 16, 24, 16, 1),
    _case("odd", 37, 5, 13, 7, 2, *_BIASES),
    _case("several-tiles", 150, 3, 72, 40, 2),
    _case("no-gate", 40, 4, 24, 20, 2, *_BIASES, activation="gelu_tanh"),
    _case("geglu", 20, 4, 24, 20, 2, activation="geglu"),
    _case("capacity", 40, 4, 24, 20, 2, *_BIASES, capacity=11),
    _case("unused-slots", 40, 4, 24, 20, 4, *_BIASES, unused=0.5),
    _case("recompute", 40, 4, 24, 20, 2, *_BIASES, recompute=True),
    _case("padded", 40, 4, 24, 20, 2, *_BIASES, layout="padded"),
    _case("transposed", 40, 4, 24, 20, 2, *_BIASES, layout="transposed"),
    _case("stored-in-out", 40, 4, 24, 20, 2, stored="in_out", dtypes=_BOTH),
    *(
        replace(_case(f"inference-{name}", *sizes, dtypes=_BOTH, **options), gradients=False)
        for name, sizes, options in (
            ("mixtral", (5, 4, 40, 24, 2), {}),
            ("gpt-oss", (20, 6, 48, 20, 3, *_BIASES), {"activation": "gpt_oss_glu", "packed": "interleaved"}),
            ("one-token", (1, 8, 64, 20, 2, *_BIASES), {}),
            ("no-gate", (9, 4, 24, 20, 2, "gate_up_bias"), {"activation": "gelu_tanh"}),
            ("dropped", (30, 4, 24, 20, 2), {"capacity": 5}),
            ("stored-in-out", (12, 4, 24, 20, 2), {"stored": "in_out"}),
            ("padded", (12, 4, 24, 20, 2, *_BIASES), {"layout": "padded"}),
            (
                "mxfp4",
                (7, 4, 64, 32, 2, *_BIASES),
                {"activation": "gpt_oss_glu", "packed": "interleaved", "format": "mxfp4"},
            ),
            ("mxfp4-halves", (3, 4, 96, 64, 2), {"format": "mxfp4"}),
            (
                "mxfp4-tiles",
                (7, 4, 128, 64, 2, *_BIASES),
                {"activation": "gpt_oss_glu", "packed": "interleaved", "format": "mxfp4_tiles"},
            ),
            ("int4-tiles", (21, 4, 64, 128, 2), {"format": "int4_tiles"}),
            ("fp8", (7, 4, 64, 32, 2), {"format": "fp8"}),
        )
    ),
    # What lies between the products is rounded to fp8: a rounding before it takes one value of 32 or more to the next
    # code, up to an eighth away. And tensor cores keep about 13 bits of partial sums of 8-bit floats.
    *(
        replace(
            case,
            options={**case.options, "activations": "fp8"},
            dtypes=_BOTH,
            gradients=False,
            half_rule=False,
            through=torch.bfloat16,
        )
        for case in (
            _case(
                "fp8-activations-mxfp4",
                70,
                4,
                64,
                32,
                2,
                *_BIASES,
                activation="gpt_oss_glu",
                packed="interleaved",
                format="mxfp4",
            ),
            _case("fp8-activations-mxfp4-few", 7, 4, 96, 64, 2, *_BIASES, format="mxfp4"),
            _case("fp8-activations-fp8", 12, 4, 64, 32, 2, format="fp8"),
        )
    ),
    _case("no-tokens", 0, 4, 24, 20, 2, *_BIASES),
)


def _resized(axes: Axes, changed: Axes) -> dict[str, Any]:
    """The axes with other sizes; a token has no more slots than there are experts, unless it is told to."""
    given = {**axes, **changed}
    return given if "slots" in changed else {**given, "slots": min(given["slots"], given["num_experts"])}


def _random_case(rng: Rng, case: Case) -> Case:
    """Slots that fit, and an activation with the width that goes with it."""
    options = {name: value for name, value in case.options.items() if name in ("recompute", "stored")}
    gated = rng.maybe(0.7)
    options["activation"] = rng.one(tuple(GATES) if gated else ACTIVATIONS)
    options["packed"] = rng.one(PACKINGS) if gated else "halves"
    axes = dict(case.axes)
    if rng.maybe(0.3):
        options["capacity"] = rng.call.randint(1, 20)
    axes |= {"gated": gated, "slots": min(rng.one((1, 2, 3)), axes["num_experts"]), "unused": rng.one((0.0, 0.3))}
    # Where a product lies so near to a kink that rounding takes it across, its gradient is another one.
    gradients = rng.maybe(0.7)
    kinked = options["activation"] in ("relu", "reglu", "gpt_oss_glu") and case.dtypes[0] != torch.float32
    return replace(case, axes=axes, options=options, gradients=gradients and not kinked)


LAYERS = {  # name: (model, experts, experts of a token, biases, options)
    "gpt-oss-20b": ("gpt-oss-20b", 32, 4, _BIASES, {"activation": "gpt_oss_glu", "packed": "interleaved"}),
    "mixtral": ("mixtral-8x7b", 8, 2, (), {}),
    "qwen3-30b": ("qwen3-30b-a3b", 128, 8, (), {}),
}
TOKENS = (1, 16, 64, 512, 4096, 16384)


def _bench(layer: str, tokens: int, kind: str = "", **more: Any) -> Case:
    """Inference; or with a kind "train" (forward and backward, each) or "step" (both in one, for peak memory)."""
    model, experts, k, biases, given = LAYERS[layer]
    options = {**given, **more}
    sizes = MODELS[model]
    small = _axes(min(tokens, 128), 4 if k <= 4 else 8, 256, 128, k)
    return Case(
        "-".join([layer, str(tokens), *([kind] if kind else []), *more.values()]),
        _axes(tokens, experts, sizes.hidden, sizes.intermediate, k), options, dtypes=(torch.bfloat16,), present=biases,
        check_axes=small,
        gradients=bool(kind),
    )  # fmt: skip


_BENCHES = (
    *(_bench(layer, tokens) for layer in LAYERS for tokens in TOKENS),
    *(_bench("gpt-oss-20b", tokens, format="mxfp4_tiles") for tokens in TOKENS[:3]),
    _bench("gpt-oss-20b", 4096, format="mxfp4", activations="fp8"),
    _bench("gpt-oss-20b", 16384, "train"),
    _bench("gpt-oss-20b", 16384, "step"),
)


def touched_experts(experts: int, rows: int) -> float:
    """Experts with at least one of so many rows, on average, where every row goes to a random one."""
    return experts * (1.0 - (1.0 - 1.0 / experts) ** rows)


def _cost(case: Case, dtype: torch.dtype) -> Mapping[str, Cost]:
    """Both products; x, the weights of the experts that have rows, and the result are moved once.

    The backward pass has twice the products. Cases named as steps are timed forward and backward in one.
    """
    axes = case.axes
    rows = axes["tokens"] * axes["slots"]
    matrix = axes["hidden"] * axes["inner"] * (3 if axes["gated"] else 2)
    of_weight = 17 / 32 if case.options.get("format", "").startswith("mxfp4") else dtype.itemsize  # bytes, with scales
    moved = touched_experts(axes["num_experts"], rows) * matrix * of_weight
    moved += 2 * axes["tokens"] * axes["hidden"] * dtype.itemsize
    return costs(case, Cost(2.0 * rows * matrix, moved), Cost(4.0 * rows * matrix, 2 * moved))


MOE_EXPERTS = declare(
    _PACKAGE,
    "moe_experts",
    "each token through its experts, and the weighted sum: gathered, gated, combined",
    function=f"{_PACKAGE}.named:moe_experts",
    reference=f"{_PACKAGE}.named:reference",
    inputs=_INPUTS,
    kernels=(
        backends.hopper(PRODUCTS, support.rounded_activations),
        backends.triton(PRODUCTS, support.rounded_activations, dtypes=FLOATS, min_arch=80),
    ),
    workload=Workload(_CASES, _BENCHES, _cost),
    tolerance=Tolerance(floor32=8.0, of_inputs="gradients"),
    sum_length=lambda case: case.axes["hidden"] + case.axes["inner"],
    ranges={"tokens": (0, 70, 1), "num_experts": (1, 8, 1), "hidden": (1, 50, 1), "inner": (1, 40, 1)},
    resized=_resized,
    random_case=_random_case,
    random_share=2,
    baselines=(Baseline("vllm", f"{_PACKAGE}.baselines:vllm", forward_only=True), "hf_grouped", "hf_eager"),
)
OPS = (MOE_ROUTE, MOE_SORT, MOE_EXPERTS)
