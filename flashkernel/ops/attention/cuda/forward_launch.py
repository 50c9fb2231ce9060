"""The launcher of the CUDA C++ attention forward kernel, with and without rotation of q and k."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flashkernel.blocks.tile_ranges import tile_ranges
from flashkernel.core import cuda, tune
from flashkernel.ops.attention.cuda.configs import FORWARD, padded_dim
from flashkernel.ops.attention.cuda.launch import (
    DROPOUT,
    RANGES,
    SCORES,
    SIZES,
    STRIDES,
    dropout_arguments,
    has_extras,
    kernel_for,
    range_arguments,
    score_arguments,
    size_arguments,
    strides,
)
from flashkernel.ops.attention.params import AttentionInputs, AttentionParams


class Rotary(NamedTuple):
    """Tables of the rotary embedding, float32 [positions, rotary_dim / 2] and contiguous; key j is at position j."""

    cos: Tensor
    sin: Tensor
    interleaved: bool


_FORWARD_ARGUMENTS = (
    f"pointer, pointer, pointer, pointer, pointer, pointer, {STRIDES}, {STRIDES}, {STRIDES}, "
    f"{RANGES}, int32, {SIZES}, {SCORES}, {DROPOUT}, pointer, pointer, int32"
)


def launch_forward(inputs: AttentionInputs, params: AttentionParams, rotary: Rotary | None) -> tuple[Tensor, Tensor]:
    """(o, lse): o is (batch, seqlen_q, heads, value_dim) in q's dtype, lse (batch, heads, seqlen_q) in float32.

    With `rotary`, q and k are rotated as they are loaded.
    """
    q, k, v = (cuda.vectorized(x) for x in (inputs.q, inputs.k, inputs.v))
    inputs = inputs._replace(q=q, k=k, v=v)
    batch, seqlen_q, heads, head_dim = q.shape
    seqlen_k, value_dim = k.shape[1], v.shape[3]
    o = torch.empty((batch, seqlen_q, heads, value_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, seqlen_q), dtype=torch.float32, device=q.device)
    target = cuda.target(q.device)
    extras = rotary is not None or has_extras(inputs, params)
    shape = {"head_dim": head_dim, "value_dim": value_dim, "extras": int(extras)}
    config = tune.pick(FORWARD, target, shape)
    ranges = tile_ranges(params.mask, batch, heads, seqlen_q, seqlen_k, config.block_m, config.block_n, q.device)
    tiles = tune.ceil_div(seqlen_q, config.block_m)
    kernel, tables = kernel_for(
        "forward", _FORWARD_ARGUMENTS, inputs, params, config.template,
        HAS_ROTARY=rotary is not None, ROTARY_INTERLEAVED=rotary is not None and rotary.interleaved,
    )  # fmt: skip
    kernel.launch(
        tiles * heads * batch, config.num_warps * 32,
        (
            q, k, v, inputs.sinks, o, lse, *strides(q), *strides(k), *strides(v), *range_arguments(ranges), tiles,
            *size_arguments(inputs), *score_arguments(inputs, params), *dropout_arguments(params),
            *((None, None, 0) if rotary is None else (rotary.cos, rotary.sin, 2 * rotary.cos.shape[1])), *tables,
        ),
        shared=config.shared_bytes(padded_dim(head_dim), padded_dim(value_dim)), device=q.device,
    )  # fmt: skip
    return o, lse
