"""The declaration of rotary attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from flashkernel.blocks.mask import causal, window
from flashkernel.core import backends
from flashkernel.core.declare import Workload, declare
from flashkernel.core.op import Axes, Call, Case, Cost, Draw, Input, Tolerance
from flashkernel.core.random_case import Rng

_PACKAGE = "flashkernel.ops.attention.rotary"


def _cuda(call: Call) -> str | None:
    head_dim, value_dim, rotary_dim = (call.facts[name] for name in ("head_dim", "value_dim", "rotary_dim"))
    if head_dim % 8 or value_dim % 8 or max(head_dim, value_dim) > 256:
        return f"heads must be multiples of 8 and at most 256 wide, not {head_dim} and {value_dim}"
    if max(head_dim, value_dim) > 128 and call.gradients:
        return f"with gradients heads must be at most 128 wide, not {head_dim} and {value_dim}"
    if rotary_dim % 16:
        return f"it rotates 16 dims at a time, not {rotary_dim}"
    return None


def _table(function: str) -> Draw:
    """Cosines or sines of the angles of Llama's frequencies."""

    def draw(shape: tuple[int, ...], axes: Axes, generator: torch.Generator) -> torch.Tensor:
        positions = torch.arange(shape[0], device=generator.device, dtype=torch.float32)
        pairs = torch.arange(shape[1], device=generator.device, dtype=torch.float32)
        return getattr(positions[:, None] * 10000.0 ** (-pairs / max(1, shape[1])), function)()

    return draw


_INPUTS = {
    "q": Input(("batch", "queries", "heads", "head_dim")),
    "k": Input(("batch", "keys", "kv_heads", "head_dim")),
    "v": Input(("batch", "keys", "kv_heads", "value_dim")),
    "cos": Input(("positions", "pairs"), dtype=torch.float32, draw=_table("cos"), grad=False),
    "sin": Input(("positions", "pairs"), dtype=torch.float32, draw=_table("sin"), grad=False),
}


def _axes(batch: int, queries: int, keys: int, heads: int, kv_heads: int, dim: int, rotary: int = 0) -> Axes:
    return {
        "batch": batch, "queries": queries, "keys": keys, "heads": heads, "kv_heads": kv_heads, "head_dim": dim,
        "value_dim": dim, "positions": keys + 3, "pairs": (rotary or dim) // 2,
    }  # fmt: skip


_CASES = (
    Case("plain", _axes(2, 33, 33, 2, 2, 32)),
    Case("more-keys", _axes(2, 17, 23, 4, 2, 32, 16), {"causal": True}),
    Case("causal", _axes(1, 70, 70, 4, 2, 64), {"causal": True, "return_lse": True}),
    Case("interleaved", _axes(1, 20, 35, 2, 1, 64), {"interleaved": True, "causal": True, "scale": 0.1}),
    Case("partial", _axes(1, 21, 40, 2, 1, 80, 32), {"mask": causal() & window(9)}),
    Case("partial-interleaved", _axes(1, 21, 40, 2, 2, 64, 48), {"interleaved": True, "window": 12}),
    Case("longer-queries", _axes(1, 30, 9, 2, 1, 16), {"causal": True}),
    Case("several-tiles", _axes(1, 150, 300, 1, 1, 128), {"causal": True}),
    Case("odd-pairs", _axes(1, 9, 9, 2, 2, 16, 6), {"causal": True}),
    Case("transposed", _axes(2, 14, 14, 4, 2, 16), {"causal": True}, layout="transposed"),
    Case("padded", _axes(2, 14, 19, 4, 2, 24, 16), {"causal": True}, layout="padded"),
    Case("offset", _axes(1, 14, 19, 2, 1, 32), {"causal": True}, layout="offset"),
    Case("no-queries", _axes(1, 0, 5, 2, 1, 16), {"return_lse": True}),
    Case("no-keys", _axes(1, 5, 0, 2, 1, 16), {"return_lse": True}),
)


def _random_case(rng: Rng, case: Case) -> Case:
    """A table for all keys, of whole 16 dims or of some, within the head."""
    axes = dict(case.axes)
    axes["positions"] = axes["keys"] + rng.one((0, 3))
    axes["pairs"] = min(rng.one((1, 8, 16, 32)), axes["head_dim"] // 2)
    return replace(case, axes=axes)


def _benches() -> tuple[Case, ...]:
    checked = {"batch": 1, "queries": 1024, "keys": 1024, "positions": 1024}
    return tuple(
        Case(f"d{dim}-n{length}-causal", {**_axes(16384 // length, length, length, 2048 // dim, 2048 // dim, dim),
             "positions": length}, {"causal": True}, dtypes=(torch.float16,), check_axes=checked)
        for dim in (64, 128)
        for length in (1024, 4096)
    )  # fmt: skip


def _cost(case: Case, dtype: torch.dtype) -> Mapping[str, Cost]:
    from flashkernel.ops.attention.spec import ATTENTION

    axes = dict(case.axes)
    options = {name: value for name, value in case.options.items() if name != "interleaved"}
    plain = ATTENTION.cost(Case(case.name, axes, options), dtype)
    tables = 8.0 * axes["positions"] * axes["pairs"]
    return {name: Cost(cost.flops, cost.bytes + tables) for name, cost in plain.items()}


ROTARY_ATTENTION = declare(
    _PACKAGE,
    "rotary_attention",
    "softmax attention that rotates q and k (RoPE) as it loads them",
    inputs=_INPUTS,
    kernels=(backends.cuda(f"{_PACKAGE}.cuda", _cuda, dtypes=(torch.float16, torch.bfloat16), auto_devices=("cuda",)),),
    workload=Workload(_CASES, _benches(), _cost),
    tolerance=Tolerance(floor32=8.0, of_inputs="gradients"),
    ranges={"queries": (0, 40, 1), "keys": (8, 40, 1), "positions": (40, 48, 1)},
    random_case=_random_case,
    baselines=("eager",),
)
