"""The declaration of attention over packed sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from flashkernel.core import backends
from flashkernel.core.declare import Workload, declare
from flashkernel.core.op import Axes, Baseline, Call, Case, Cost, Draw, Input, Tolerance
from flashkernel.core.random_case import Rng
from flashkernel.core.shapes import MODELS
from flashkernel.ops.attention import support
from flashkernel.ops.attention.varlen.params import sides

_PACKAGE = "flashkernel.ops.attention.varlen"


def _hopper(call: Call) -> str | None:
    if call.facts["has_mask"]:
        return "it has no mask beside causal and window; a mask of packed positions goes to the portable kernels"
    return support.hopper(call)


def _cumulative(axis: str) -> Draw:
    """Cumulative lengths of the sequences."""

    def draw(shape: tuple[int, ...], axes: Axes, generator: torch.Generator) -> torch.Tensor:
        ends = [0]
        for length in axes[axis]:
            ends.append(ends[-1] + length)
        return torch.tensor(ends, dtype=torch.int32, device=generator.device)

    return draw


_INPUTS = {
    "q": Input(("tokens", "heads", "head_dim")),
    "k": Input(("keys", "kv_heads", "head_dim"), must_vary=True),
    "v": Input(("keys", "kv_heads", "value_dim"), must_vary=True),
    "cu_seqlens_q": Input(("bounds",), dtype=torch.int32, draw=_cumulative("lengths"), grad=False),
    "cu_seqlens_k": Input(
        ("bounds",), dtype=torch.int32, draw=_cumulative("key_lengths"), grad=False, optional=True
    ),
    "sinks": Input(("heads",), optional=True),
}  # fmt: skip


def _axes(
    lengths: Sequence[int], heads: int | tuple[int, int], dims: int | tuple[int, int],
    key_lengths: Sequence[int] | None = None, behind: int = 0,
) -> Axes:  # fmt: skip
    """Sizes of a case, with `behind` tokens behind the last sequence."""
    query_heads, kv_heads = heads if isinstance(heads, tuple) else (heads, heads)
    head_dim, value_dim = dims if isinstance(dims, tuple) else (dims, dims)
    of_keys = lengths if key_lengths is None else key_lengths
    return {
        "lengths": tuple(lengths), "key_lengths": tuple(of_keys), "tokens": sum(lengths) + behind,
        "keys": sum(of_keys) + behind, "bounds": len(lengths) + 1, "heads": query_heads, "kv_heads": kv_heads,
        "head_dim": head_dim, "value_dim": value_dim,
    }  # fmt: skip


_CAUSAL = {"causal": True}
_CASES = (
    Case("plain", _axes((13, 20), 2, 32)),
    Case("causal", _axes((19, 1, 33), (4, 2), 16), {**_CAUSAL, "return_lse": True}),
    Case("one-sequence", _axes((37,), 2, 16), _CAUSAL),
    Case("empty-sequences", _axes((0, 9, 0, 0, 14, 0), 2, 16), {**_CAUSAL, "return_lse": True}),
    Case("tokens-behind", _axes((9, 14), (2, 1), 16, behind=5), {**_CAUSAL, "return_lse": True}),
    Case("many-short", _axes((1, 2, 3, 1, 5, 4) * 5, 2, 16), _CAUSAL),
    Case("several-tiles", _axes((70, 150, 33), (2, 1), 16), {**_CAUSAL, "return_lse": True}),
    Case("window", _axes((40, 7, 25), (4, 2), 16), {"window": 6}),
    Case("two-sided", _axes((40, 7), 2, 16, (30, 25)), {"window": (6, 9)}, present=("cu_seqlens_k",)),
    Case("longer-keys", _axes((5, 1, 9), (4, 2), 16, (12, 30, 9)), _CAUSAL, present=("cu_seqlens_k",)),
    Case("longer-queries", _axes((12, 9), 2, 16, (5, 20)), {**_CAUSAL, "return_lse": True}, present=("cu_seqlens_k",)),
    Case("cross", _axes((7, 0, 12), 2, 16, (20, 3, 0)), {"return_lse": True}, present=("cu_seqlens_k",)),
    Case("gpt-oss", _axes((37, 5, 22), (8, 1), 64), {**_CAUSAL, "window": 8}, present=("sinks",)),
    Case("sinks-behind", _axes((9, 4), 2, 16, behind=3), {"return_lse": True}, present=("sinks",)),
    Case("softcap", _axes((16, 9), 2, 32), {**_CAUSAL, "softcap": 1.5, "scale": 0.3}),
    Case("deterministic", _axes((30, 9), (4, 2), 16), {**_CAUSAL, "deterministic": True}, present=("sinks",)),
    Case("narrow-values", _axes((18, 8), (4, 2), (48, 32)), _CAUSAL),
    Case("transposed", _axes((14, 5), (4, 2), 16), _CAUSAL, layout="transposed"),
    Case("padded", _axes((14, 5), (4, 2), 24), _CAUSAL, layout="padded"),
    Case("no-tokens", _axes((0, 0), 2, 16), {"return_lse": True}),
    Case("no-keys", _axes((3, 5), 2, 16, (0, 0)), {"return_lse": True}, present=("cu_seqlens_k",)),
)
_HEADS = ((1, 1), (2, 1), (2, 2)), ((1, 1), (4, 1), (4, 2), (8, 1))  # small, large
_DIMS = (8, 16, 24, 32, 64), (16, 64, 64, 128, 128, 80, 192, 256)


def _random_case(rng: Rng, case: Case) -> Case:
    """Lengths of a few long sequences or many short ones, some of them empty."""
    most, count = (400, rng.one((1, 3, 8, 40))) if rng.large else (40, rng.one((1, 2, 5)))
    lengths = [0 if rng.call.random() < 0.1 else rng.size(1, most) for _ in range(count)]
    present = tuple(name for name in case.present if name in ("sinks", "cu_seqlens_k"))
    keys = [rng.size(0, most) for _ in lengths] if "cu_seqlens_k" in present else lengths
    dims = _DIMS[rng.large]
    axes = _axes(lengths, rng.one(_HEADS[rng.large]), (rng.one(dims), rng.one(dims)), keys, rng.one((0, 0, 7)))
    options = dict(case.options)
    if "window" in options:
        sizes = [rng.kernel.randint(4, 200 if rng.large else 24) for _ in range(2)]
        options["window"] = tuple(sizes) if isinstance(options["window"], tuple) else sizes[0]
    # A query that sees one key has no gradient for q and k, against which rounding cannot be measured.
    gradients = min(keys, default=0) >= 4 and "cu_seqlens_k" not in present
    return replace(case, axes=axes, options=options, present=present, gradients=gradients)


# Lengths of 37 to 4,000 tokens in 16,384, as a packed batch of documents has them.
_MIX = (4000, 37, 2900, 310, 1700, 96, 2500, 780, 1450, 61, 1100, 950, 500)
_SHORT = (128,) * 128


def _benches() -> tuple[Case, ...]:
    llama, oss = MODELS["llama-3.1-8b"], MODELS["gpt-oss-20b"]
    small = _axes((300, 37, 200), 1, 1)
    checked = {name: small[name] for name in ("lengths", "key_lengths", "tokens", "keys", "bounds")}
    shared: dict[str, Any] = {"dtypes": (torch.bfloat16,), "check_axes": checked}
    lengths = (*_MIX[:-1], 16384 - sum(_MIX[:-1]))
    return (
        Case("gqa-d128", _axes(lengths, (llama.heads, llama.kv_heads), 128), _CAUSAL, **shared),
        Case("gpt-oss", _axes(lengths, (oss.heads, oss.kv_heads), 64), {**_CAUSAL, "window": 128},
             present=("sinks",), **shared),
        Case("d64", _axes(lengths, 32, 64), _CAUSAL, **shared),
        Case("short-gqa-d128", _axes(_SHORT, (llama.heads, llama.kv_heads), 128), _CAUSAL, **shared),
        Case("short-d64", _axes(_SHORT, 32, 64), _CAUSAL, **shared),
    )  # fmt: skip


def _visible_pairs(case: Case) -> int:
    """Pairs that are seen in a head."""
    left, right = sides(case.options.get("causal", False), case.options.get("window"))
    pairs = 0
    for queries, keys in zip(case.axes["lengths"], case.axes["key_lengths"]):
        position = torch.arange(keys - queries, keys, device="cpu")
        last = (position + (keys if right is None else right)).clamp(max=keys - 1)
        first = (position - (keys + queries if left is None else left)).clamp(min=0)
        pairs += int((last - first + 1).clamp(min=0).sum())
    return pairs


def _cost(case: Case, dtype: torch.dtype) -> Mapping[str, Cost]:
    """Two matrix products over the visible pairs forward and five backward; every tensor moves once."""
    axes = case.axes
    pairs = _visible_pairs(case) * axes["heads"]
    forward = 2.0 * pairs * (axes["head_dim"] + axes["value_dim"])
    backward = 2.0 * pairs * (3 * axes["head_dim"] + 2 * axes["value_dim"])
    by_query, by_key = (axes[n] * axes[h] * dtype.itemsize for n, h in (("tokens", "heads"), ("keys", "kv_heads")))
    operands = by_query * axes["head_dim"] + by_key * (axes["head_dim"] + axes["value_dim"])  # q, k, v
    result = by_query * axes["value_dim"]  # out, or its gradient
    return {"fwd": Cost(forward, operands + result), "bwd": Cost(backward, 2 * operands + 2 * result)}


_HALF = (torch.float16, torch.bfloat16)
ATTENTION_VARLEN = declare(
    _PACKAGE,
    "attention_varlen",
    "attention over packed sequences, by their cumulative lengths",
    inputs=_INPUTS,
    kernels=(
        backends.hopper("flashkernel.ops.attention.hopper.varlen", _hopper, deprioritized=support.unmeasured),
        replace(backends.triton(f"{_PACKAGE}.by_mask:triton", support.triton, min_arch=80), composite=True),
        replace(backends.cuda(f"{_PACKAGE}.by_mask:cuda", support.cuda, _HALF, auto_devices=("cuda",)), composite=True),
    ),
    workload=Workload(_CASES, _benches(), _cost),
    # Gradients start from probabilities and an output that were rounded to the inputs' dtype; the lse does not.
    tolerance=Tolerance(floor32=8.0, of_inputs="gradients"),
    random_case=_random_case,
    baselines=("sdpa", "cudnn", "fa2", Baseline("fa3", f"{_PACKAGE}.baselines:fa3", forward_only=True), "fa4"),
)
