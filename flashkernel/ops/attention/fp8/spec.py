"""The operator declaration of FP8 attention: inputs, backends, test and benchmark cases, cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks.fp8 import FP8, SCALE_BLOCK
from flashkernel.blocks.mask import Mask, causal, custom, sink_tokens, window
from flashkernel.core import backends
from flashkernel.core.declare import Workload, declare
from flashkernel.core.op import Axes, Call, Case, Cost, Input, Tolerance
from flashkernel.core.shapes import MODELS
from flashkernel.ops.attention.random_cases import random_fp8_case
from flashkernel.ops.attention.workload import axes_of, visible_pairs

_PACKAGE = "flashkernel.ops.attention.fp8"
_TOKENS, _WIDTH = 16384, 2048  # of the benchmarks: tokens in all, and heads * head_dim
_SPREAD = 64.0  # of the e4m3 elements, which reach 448; the scales bring them back to order one


def _triton(call: Call) -> str | None:
    widest = max(call.facts["head_dim"], call.facts["value_dim"])
    return f"heads must be at most 256 wide, not {widest}" if widest > 256 else None


def _hopper(call: Call) -> str | None:
    head_dim, value_dim = call.facts["head_dim"], call.facts["value_dim"]
    if head_dim != value_dim or head_dim not in (64, 128):
        return f"heads must be 64 or 128 wide, keys and values alike, not {head_dim} and {value_dim}"
    return None


def _spread(shape: tuple[int, ...], axes: Axes, generator: torch.Generator) -> Tensor:
    return (torch.randn(shape, generator=generator, device=generator.device) * _SPREAD).clamp(-448, 448)


def _values(shape: tuple[int, ...], axes: Axes, generator: torch.Generator) -> Tensor:
    """V with contiguous keys, as `quantize_fp8(v, transpose=True)` makes it."""
    batch, keys, heads, width = shape
    return _spread((batch, heads, width, keys), axes, generator).permute(0, 3, 1, 2)


def _scales(shape: tuple[int, ...], axes: Axes, generator: torch.Generator) -> Tensor:
    return (0.5 + torch.rand(shape, generator=generator, device=generator.device)) / _SPREAD


_INPUTS = {
    "q": Input(("batch", "queries", "heads", "head_dim"), FP8, _spread, grad=False),
    "k": Input(("batch", "keys", "kv_heads", "head_dim"), FP8, _spread, grad=False),
    "v": Input(("batch", "keys", "kv_heads", "value_dim"), FP8, _values, grad=False),
    "q_scale": Input(("batch", "heads", "*q_blocks"), torch.float32, _scales, grad=False),
    "k_scale": Input(("batch", "kv_heads", "*k_blocks"), torch.float32, _scales, grad=False),
    "v_scale": Input(("batch", "kv_heads", "*v_blocks"), torch.float32, _scales, grad=False),
    "sinks": Input(("heads",), grad=False, optional=True),
}


def _axes(
    batch: int, lengths: int | tuple[int, int], heads: int | tuple[int, int], dims: int | tuple[int, int],
    blocks: str = "",
) -> Axes:  # fmt: skip
    """As `axes_of`; `blocks` names those of q, k and v that have a scale for every 128 positions."""
    axes = axes_of(batch, lengths, heads, dims)
    scales = {
        f"{name}_blocks": (-(-axes[length] // SCALE_BLOCK),) if name in blocks else ()
        for name, length in (("q", "queries"), ("k", "keys"), ("v", "keys"))
    }
    return {**axes, **scales}


def _masked(name: str, mask: Mask, lengths: int | tuple[int, int] = (13, 21)) -> Case:
    return Case(f"mask-{name}", _axes(2, lengths, (4, 2), 64), {"mask": mask})


_FULL: dict[str, Any] = {"return_lse": True, "out_dtype": torch.float32}
_CASES = (
    Case("plain", _axes(2, 33, 2, 64)),
    Case("d128", _axes(1, 40, (4, 2), 128), {"mask": causal(), **_FULL}),
    Case("mqa", _axes(1, 24, (4, 1), 64), {"mask": causal()}),
    Case("narrow-heads", _axes(1, 17, 2, 16), {"mask": causal()}),
    Case("narrow-values", _axes(1, 18, (4, 2), (48, 32))),
    Case("longer-keys", _axes(2, (5, 40), 2, 64), {"mask": causal()}),
    Case("longer-queries", _axes(1, (40, 9), 2, 64), {"mask": causal(), **_FULL}),  # the first see nothing
    Case("several-tiles", _axes(1, (150, 300), 1, 64), {"mask": causal() & window(70)}),
    Case("one-query", _axes(3, (1, 29), (4, 2), 64), {"mask": causal(), "return_lse": True}),
    Case("scale", _axes(1, 12, 2, 64), {"scale": 0.5}),
    Case("negative-scale", _axes(1, 12, 2, 64), {"scale": -0.1, **_FULL}),
    Case("padded", _axes(2, 14, (4, 2), 64), {"mask": causal()}, layout="padded"),
    Case("transposed", _axes(2, 14, (4, 2), 64), {"mask": causal()}, layout="transposed"),
    Case("no-batch", _axes(0, 5, 2, 64)),
    Case("no-queries", _axes(2, (0, 5), 2, 64), {"return_lse": True}),
    Case("no-keys", _axes(2, (5, 0), 2, 64), {"return_lse": True}),
    _masked("window", causal() & window(5)),
    _masked("sink-tokens", (window(4) | sink_tokens(2)) & causal()),
    _masked("by-head", custom(lambda b, h, q, k: (k <= q + 2 * h) & ((q + k) % 3 > 0), "by head"), 17),
    _masked("nothing", custom(lambda b, h, q, k: k < 0, "nothing")),
    Case("softcap", _axes(1, 16, 2, 64), {"mask": causal(), "softcap": 1.5}),
    Case("sinks", _axes(2, 11, (4, 2), 64), _FULL, present=("sinks",)),
    Case("gpt-oss", _axes(1, 37, (8, 1), 64), {"mask": causal() & window(8)}, present=("sinks",)),
    Case("blocks", _axes(2, (140, 270), (4, 2), 64, blocks="qkv"), {"mask": causal()}),
    Case("key-blocks", _axes(1, (20, 150), (2, 1), 64, blocks="k"), _FULL),
    Case("value-blocks", _axes(1, (20, 300), (2, 1), 64, blocks="v"), {"mask": causal()}),
    Case("everything", _axes(2, (20, 140), (4, 2), 64, blocks="qv"),
         {"mask": causal() & window(70), "scale": 0.3, "softcap": 3.0, **_FULL}, present=("sinks",)),
)  # fmt: skip


def _benches() -> tuple[Case, ...]:
    square: dict[str, Any] = {"dtypes": (torch.bfloat16,), "check_axes": {"batch": 1, "queries": 1024, "keys": 1024}}
    grid = [
        Case(f"d{dim}-n{length}{'-causal' if mask else ''}", _axes(_TOKENS // length, length, _WIDTH // dim, dim),
             {"mask": causal()} if mask else {}, **square)
        for dim in (64, 128)
        for length in (4096, 16384)
        for mask in (False, True)
    ]  # fmt: skip
    blocks = {"check_axes": {**square["check_axes"], **{f"{name}_blocks": (8,) for name in "qkv"}}}
    llama = MODELS["llama-3.1-8b"]
    return (
        *grid,
        Case("blocks-d128-n16384", _axes(1, 16384, 16, 128, blocks="qkv"), {}, **{**square, **blocks}),
        Case("gqa-d128-n16384-causal", _axes(1, 16384, (llama.heads, llama.kv_heads), llama.head_dim),
             {"mask": causal()}, **square),
    )  # fmt: skip


def _cost(case: Case, dtype: torch.dtype) -> Mapping[str, Cost]:
    """Two matrix products over the visible (query, key) pairs; every tensor is moved once."""
    axes = case.axes
    batch, queries, keys, heads = axes["batch"], axes["queries"], axes["keys"], axes["heads"]
    pairs = visible_pairs(case.options.get("mask"), batch, heads, queries, keys)
    operands = batch * queries * heads * axes["head_dim"]
    operands += batch * keys * axes["kv_heads"] * (axes["head_dim"] + axes["value_dim"])
    out = case.options.get("out_dtype", torch.bfloat16).itemsize
    result = batch * queries * heads * axes["value_dim"] * out
    return {"fwd": Cost(2.0 * pairs * (axes["head_dim"] + axes["value_dim"]), operands + result)}


ATTENTION_FP8 = declare(
    _PACKAGE,
    "attention_fp8",
    "softmax attention of FP8 queries, keys and values, forward",
    inputs=_INPUTS,
    kernels=(
        backends.hopper(f"{_PACKAGE}.hopper", _hopper, dtypes=(FP8,)),
        backends.triton(f"{_PACKAGE}.triton", _triton, dtypes=(FP8,), min_arch=89),
    ),
    workload=Workload(_CASES, _benches(), _cost),
    # P is rounded to e4m3: the relative error is at most 1/16, half of its eps.
    tolerance=Tolerance(floor=0.5, through=FP8),
    differentiable=False,
    random_case=random_fp8_case,
    random_share=3,
    baselines=("eager", "fa3"),
)
