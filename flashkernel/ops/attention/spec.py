"""The declaration of attention."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from flashkernel.blocks import expression as ex
from flashkernel.blocks.mask import Mask, causal, custom, prefix, sink_tokens, window
from flashkernel.core import backends
from flashkernel.core.declare import declare
from flashkernel.core.op import Axes, Baseline, Case, Cost, Draw, Input, Tolerance
from flashkernel.core.shapes import MODELS
from flashkernel.ops.attention import support
from flashkernel.ops.attention.fp8.spec import ATTENTION_FP8
from flashkernel.ops.attention.random_cases import mask_of, random_case
from flashkernel.ops.attention.rotary.spec import ROTARY_ATTENTION
from flashkernel.ops.attention.varlen.spec import ATTENTION_VARLEN
from flashkernel.ops.attention.workload import axes_of, visible_pairs

_PACKAGE = "flashkernel.ops.attention"
_HALF = (torch.bfloat16,)
_TOKENS, _WIDTH = 16384, 2048  # of the benchmarks: tokens in all, and heads * head_dim


def _slopes() -> Draw:
    """Positive, of the size that ALiBi gives its heads."""
    return lambda shape, axes, generator: torch.rand(shape, generator=generator, device=generator.device) / 2


class _Bias(Input):
    """A bias that broadcasts: over queries or keys where the axes "bias_queries" or "bias_keys" are 1."""

    def shape(self, axes: Axes) -> tuple[int, ...]:
        lengths = (axes.get(f"bias_{axis}", axes[axis]) for axis in ("queries", "keys"))
        return (axes["bias_batch"], axes["bias_heads"], *lengths)


def _bias(shape: tuple[int, ...], axes: Axes, generator: torch.Generator) -> torch.Tensor:
    """Normal; with an axis "hidden", one entry in so many is -inf."""
    values = torch.randn(shape, generator=generator, device=generator.device)
    if "hidden" not in axes:
        return values
    hidden = torch.rand(shape, generator=generator, device=generator.device) * axes["hidden"] < 1
    return values.masked_fill(hidden, -math.inf)


_INPUTS = {
    "q": Input(("batch", "queries", "heads", "head_dim")),
    "k": Input(("batch", "keys", "kv_heads", "head_dim")),
    "v": Input(("batch", "keys", "kv_heads", "value_dim")),
    "bias": _Bias(("bias_batch", "bias_heads", "queries", "keys"), draw=_bias, optional=True),
    "sinks": Input(("heads",), optional=True),
    "alibi_slopes": Input(("*slopes",), dtype=torch.float32, draw=_slopes(), optional=True),
}


def _masked(name: str, mask: Mask, lengths: int | tuple[int, int] = (13, 21)) -> Case:
    return Case(f"mask-{name}", axes_of(2, lengths, (4, 2), 16), {"mask": mask})


_SHAPES = (
    Case("plain", axes_of(2, 33, 2, 32)),
    Case("gqa", axes_of(2, 19, (6, 2), 16)),
    Case("mqa", axes_of(1, 24, (4, 1), 64), {"mask": causal()}),
    Case("longer-keys", axes_of(2, (5, 40), 2, 40), {"mask": causal()}),
    Case("longer-queries", axes_of(1, (40, 9), 2, 16), {"mask": causal(), "return_lse": True}),  # the first see nothing
    Case("wide-heads", axes_of(1, 17, 2, 96), {"mask": causal()}),
    Case("narrow-values", axes_of(1, 18, (4, 2), (48, 32)), {"mask": causal()}),
    Case("wide-values", axes_of(1, (7, 11), 2, (16, 64))),
    Case("much-narrower-values", axes_of(1, 66, (4, 1), (128, 16))),
    Case("much-wider-values", axes_of(1, (20, 35), (2, 1), (8, 40)), {"mask": causal()}),
    Case("uneven-dims", axes_of(1, 18, 2, (40, 24)), {"return_lse": True}),
    Case("odd-dims", axes_of(1, (9, 17), (2, 1), (5, 3)), {"mask": causal()}),
    Case("several-tiles", axes_of(1, (150, 300), 1, 16), {"mask": causal() & window(70)}),
    Case("one-query", axes_of(3, (1, 29), (4, 2), 32), {"mask": causal(), "return_lse": True}),
    Case("scale", axes_of(1, 12, 2, 16), {"scale": 0.5}),
    Case("negative-scale", axes_of(1, (12, 15), (2, 1), 16), {"scale": -0.5, "causal": True, "return_lse": True}),
    Case("zero-scale", axes_of(1, 12, 2, 16), {"scale": 0.0, "causal": True}),
    Case("padded", axes_of(2, 14, (4, 2), 24), {"mask": causal()}, layout="padded"),
    # Heads at odd addresses within rows at multiples of 16 bytes: 16 or 8 heads of 32 and 3 more elements.
    Case("padded-heads", axes_of(1, 18, (16, 8), 32), {"mask": causal()}, layout="padded"),
    Case("transposed", axes_of(2, 14, (4, 2), 16), {"mask": causal()}, layout="transposed"),
    Case("no-batch", axes_of(0, 5, 2, 16)),
    Case("no-queries", axes_of(2, (0, 5), 2, 16), {"return_lse": True}),
    Case("no-keys", axes_of(2, (5, 0), 2, 16), {"return_lse": True}),
)
_MASKS = (
    _masked("causal", causal()),
    Case("causal", axes_of(2, (13, 21), (4, 2), 16), {"causal": True}),
    Case("causal-window", axes_of(1, (19, 23), (4, 2), 16), {"causal": True, "window": 5, "return_lse": True}),
    Case("window-and-mask", axes_of(2, 21, 2, 16), {"window": 6, "mask": prefix(3) | window(4)}),
    _masked("window", causal() & window(5)),
    _masked("two-sided", window(3, 4)),
    _masked("sink-tokens", (window(4) | sink_tokens(2)) & causal()),
    _masked("prefix", prefix(6) | causal()),
    _masked("negated", ~window(4)),
    _masked("by-head", custom(lambda b, h, q, k: (k <= q + 2 * h) & ((q + k) % 3 > 0), "by head"), 17),
    _masked("by-batch", custom(lambda b, h, q, k: k < 3 + 5 * b, "by batch")),
    _masked("floor", custom(lambda b, h, q, k: ((q - k) // 3 <= 1) & ((q - k) % 5 != 1) & ((k - q) // 4 < 2), "floor")),
    _masked("nothing", custom(lambda b, h, q, k: k < 0, "nothing")),
)
_SCORES = (
    Case("lse", axes_of(2, 15, (4, 2), 16), {"mask": causal(), "return_lse": True}),
    Case("softcap", axes_of(1, 16, 2, 32), {"mask": causal(), "softcap": 1.5}),
    Case("sinks", axes_of(2, 11, (4, 2), 16), {"return_lse": True}, present=("sinks",)),
    Case("gpt-oss", axes_of(1, 37, (8, 1), 64), {"mask": causal() & window(8)}, present=("sinks",)),
    Case("sinks-alone", axes_of(1, (9, 4), 2, 16), {"mask": causal(), "return_lse": True}, present=("sinks",)),
    Case("alibi", axes_of(2, (9, 14), 4, 16, slopes=(4,)), {"mask": causal()}, present=("alibi_slopes",)),
    Case("alibi-by-batch", axes_of(2, 10, (4, 2), 16, slopes=(2, 4)), present=("alibi_slopes",)),
    Case("bias", axes_of(2, (9, 14), (4, 2), 16, bias_batch=2, bias_heads=4), {"mask": causal()}, present=("bias",)),
    Case("bias-for-all", axes_of(2, 13, (4, 2), 16, bias_batch=1, bias_heads=1), present=("bias",)),
    Case("bias-by-key", axes_of(2, (9, 70), (4, 2), 16, bias_batch=2, bias_heads=1, bias_queries=1), present=("bias",)),
    Case("bias-by-query", axes_of(2, (70, 9), (4, 2), 16, bias_batch=1, bias_heads=4, bias_keys=1), {"softcap": 2.0},
         present=("bias",)),
    Case("bias-of-one", axes_of(1, (70, 40), 2, 16, bias_batch=1, bias_heads=1, bias_queries=1, bias_keys=1),
         {"score": ex.score_function(lambda s, b, h, q, k: s * (0.5 + k / 40)), "return_lse": True}, present=("bias",)),
    Case("bias-by-head", axes_of(2, 13, 2, 16, bias_batch=1, bias_heads=2), {"softcap": 2.0}, present=("bias",)),
    Case("score", axes_of(2, 12, (4, 2), 16),
         {"mask": causal(),
          "score": ex.score_function(lambda s, b, h, q, k: s * 0.5 + 0.1 * (q - k) + ex.tanh(s) * h)}),
    Case("deterministic", axes_of(2, (23, 31), (4, 2), 16), {"mask": causal(), "softcap": 2.0, "deterministic": True},
         present=("sinks",)),
    Case("dropout", axes_of(2, 23, (4, 2), 16), {"mask": causal(), "dropout": 0.3, "seed": 11, "return_lse": True}),
    Case("everything", axes_of(2, (12, 17), (4, 2), 16, bias_batch=1, bias_heads=4, slopes=(4,)),
         {"mask": causal() & window(7), "scale": 0.3, "softcap": 3.0, "dropout": 0.2, "seed": 5, "return_lse": True,
          "score": ex.score_function(lambda s, b, h, q, k: s + 0.01 * k)},
         present=("bias", "sinks", "alibi_slopes")),
)  # fmt: skip


def _benches() -> tuple[Case, ...]:
    """The grid that attention is compared on everywhere, other lengths and head sizes, grouped heads, and gpt-oss's
    sliding layers."""
    square: dict[str, Any] = {"dtypes": _HALF, "check_axes": {"batch": 1, "queries": 1024, "keys": 1024}}
    grid = [
        Case(f"d{dim}-n{length}{'-causal' if mask else ''}",
             axes_of(_TOKENS // length, length, _WIDTH // dim, dim), {"mask": causal()} if mask else {}, **square)
        for dim in (64, 128)
        for length in (512, 1024, 4096, 16384)
        for mask in (False, True)
        if mask or length > 512
    ]  # fmt: skip
    wide = [
        Case(f"d256-n{length}{'-causal' if mask else ''}",
             axes_of(_TOKENS // length, length, _WIDTH // 256, 256), {"mask": causal()} if mask else {}, **square)
        for length, mask in ((4096, True), (16384, True), (16384, False))
    ]  # fmt: skip
    between = [
        Case(f"d{dim}-n{length}{'-causal' if mask else ''}",
             axes_of(_TOKENS // length, length, _WIDTH // dim, dim), {"mask": causal()} if mask else {}, **square)
        for dim, length, mask in ((64, 2048, False), (64, 8192, True), (128, 2048, True), (128, 8192, False))
    ]  # fmt: skip
    # Head sizes between powers of two: Phi-2's, Phi-3's, and DeepSeek's with values of another width.
    sizes = [
        Case("d80-n1024", axes_of(16, 1024, 32, 80), **square),
        Case("d96-n4096-causal", axes_of(4, 4096, 32, 96), {"mask": causal()}, **square),
        Case("d192-128-n4096-causal", axes_of(4, 4096, 16, (192, 128)), {"mask": causal()}, **square),
    ]
    chunk = Case(
        "chunk-1024-of-16384", axes_of(1, (1024, 16384), (32, 8), 128), {"mask": causal()}, dtypes=_HALF,
        check_axes={"queries": 256, "keys": 1024},
    )  # fmt: skip
    llama, small, oss = MODELS["llama-3.1-8b"], MODELS["llama-3.2-1b"], MODELS["gpt-oss-20b"]
    grouped = [
        Case(f"gqa-d{model.head_dim}-n{length}-causal",
             axes_of(_TOKENS // length, length, (model.heads, model.kv_heads), model.head_dim),
             {"mask": causal()}, **square)
        for model in (small, llama)
        for length in (1024, 4096, 16384)
    ]  # fmt: skip
    sliding = [
        Case(f"gpt-oss-{_TOKENS // length}x{length}",
             axes_of(_TOKENS // length, length, (oss.heads, oss.kv_heads), oss.head_dim),
             {"mask": causal() & window(128)}, present=("sinks",), **square)
        for length in (4096, 16384)
    ]  # fmt: skip
    # One sequence alone: what plain PyTorch, which holds all scores, can still do, and where its memory ends.
    single = [
        Case(f"single-n{length}", axes_of(1, length, 16, 64), {"mask": causal()}, **square)
        for length in (2048, 4096, 8192, 16384)
    ]
    long = [
        Case(f"long-n{length}", axes_of(1, length, 2, 64), {"mask": causal()}, **square) for length in (65536, 262144)
    ]
    return (*grid, *between, *wide, *sizes, chunk, *grouped, *sliding, *single, *long)


def _cost(case: Case, dtype: torch.dtype) -> Mapping[str, Cost]:
    """Two matrix products over the visible pairs forward and five backward; every tensor moves once."""
    axes = case.axes
    batch, queries, keys, heads = axes["batch"], axes["queries"], axes["keys"], axes["heads"]
    pairs = visible_pairs(mask_of(case.options), batch, heads, queries, keys)
    forward = 2.0 * pairs * (axes["head_dim"] + axes["value_dim"])
    backward = 2.0 * pairs * (3 * axes["head_dim"] + 2 * axes["value_dim"])
    by_query = batch * queries * heads * dtype.itemsize
    by_key = batch * keys * axes["kv_heads"] * dtype.itemsize
    operands = by_query * axes["head_dim"] + by_key * (axes["head_dim"] + axes["value_dim"])  # q, k, v
    result = by_query * axes["value_dim"]  # out, or its gradient
    return {"fwd": Cost(forward, operands + result), "bwd": Cost(backward, 2 * operands + 2 * result)}


ATTENTION = declare(
    _PACKAGE,
    "attention",
    "softmax attention with any mask, sinks, bias, softcap, ALiBi and dropout",
    inputs=_INPUTS,
    kernels=(
        backends.hopper(f"{_PACKAGE}.hopper", support.hopper, deprioritized=support.slower_than_triton),
        backends.triton(f"{_PACKAGE}.triton", support.triton, min_arch=80),
        backends.cuda(f"{_PACKAGE}.cuda", support.cuda, dtypes=(torch.float16, torch.bfloat16), auto_devices=("cuda",)),
    ),
    cases=(*_SHAPES, *_MASKS, *_SCORES),
    benches=_benches(),
    cost=_cost,
    # Gradients start from probabilities and an output that were rounded to the inputs' dtype; the lse does not.
    # Softmax's gradient adds up to zero over a row: what is summed from it is summed from terms that cancel.
    tolerance=Tolerance(floor32=16.0, of_inputs="gradients", canceling=("q", "k", "bias", "alibi_slopes")),
    # A row that sees one key has no gradient for q and k, against which rounding cannot be measured.
    ranges={"queries": (0, 40, 1), "keys": (8, 40, 1), "value_dim": (8, 40, 8)},
    random_case=random_case,
    random_share=8,
    baselines=tuple(
        Baseline(name, f"{_PACKAGE}.baselines:{name}", forward_only=name == "fa3")
        for name in ("eager", "sdpa", "cudnn", "fa2", "flex", "fa3", "fa4")
    ),
)
OPS = (ATTENTION, ATTENTION_VARLEN, ATTENTION_FP8, ROTARY_ATTENTION)
