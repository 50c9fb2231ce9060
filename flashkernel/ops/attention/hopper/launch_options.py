"""Launch options that the Hopper attention kernels of both directions share."""

from __future__ import annotations

import torch
from torch import Tensor

from flashkernel.blocks.tile_ranges import mean_visible_keys
from flashkernel.core import device
from flashkernel.ops.attention.hopper.block_ranges import every_row_visible
from flashkernel.ops.attention.hopper.window_backward import served_window
from flashkernel.ops.attention.params import AttentionParams

UNMASKED_KV_HEADS = 4  # kv heads whose K and V are read at a time where all work tiles are equally long
_L2_SHARE = 0.6  # of L2, for K and V of a head group


def config_shape(q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> dict[str, int]:
    """Returns what the launch configs depend on."""
    batch, seqlen_q, heads, head_dim = q.shape
    seqlen_k = k.shape[1]
    return {
        "seqlen_q": seqlen_q, "seqlen_k": seqlen_k,
        "mean_visible_keys": mean_visible_keys(params.mask, batch, heads, seqlen_q, seqlen_k), "head_dim": head_dim,
        "value_dim": v.shape[3], "group_size": heads // k.shape[2], "fixed_max": int(can_fix_max(q, k, params)),
        "masked": int(params.mask is not None),
        "has_tables": int(params.mask is not None and len(params.mask.tables) > 0),
        "window": served_window(q, k, v, params),
    }  # fmt: skip


def allocate_outputs(q: Tensor, value_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns uninitialized o (batch, seqlen_q, heads, value_dim) and lse (batch, heads, seqlen_q) in float32."""
    batch, seqlen_q, heads, _ = q.shape
    o = torch.empty((batch, seqlen_q, heads, value_dim), dtype=dtype, device=q.device)
    return o, torch.empty((batch, heads, seqlen_q), dtype=torch.float32, device=q.device)


def without_keys(o: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Fills the outputs of a call without keys (TMA cannot describe an empty K): O = 0, LSE = the sink's logit."""
    logit = lse.new_full((lse.shape[1],), float("-inf")) if sinks is None else sinks.float()
    return o.zero_(), lse.copy_(logit.view(1, -1, 1))


def can_fix_max(q: Tensor, k: Tensor, params: AttentionParams) -> bool:
    """True if the forward kernel may use the row max of a work tile's first K block for all its K blocks
    (overflow_retry.py).

    float16 lacks the range for that. A row without a visible key cannot be told from one that underflowed: under a mask
    that may leave such rows, all work tiles would be computed twice.
    """
    return q.dtype == torch.bfloat16 and every_row_visible(params.mask, q.shape[1], k.shape[1])


def head_group(
    properties: device.Device, kv_bytes: int, group_size: int, batch_heads: int, masked: bool,
    unmasked_kv_heads: int = UNMASKED_KV_HEADS,
) -> int:  # fmt: skip
    """Returns how many of `batch_heads` heads are worked on at the same time, so that what they read stays in L2.

    Args:
        kv_bytes: bytes of K and V of one kv head.
        group_size: (packed) heads that read them.
        masked: work tiles differ in length and are sorted over as many heads as L2 has room for. Without a mask,
            `unmasked_kv_heads` kv heads are enough: more than one, so that not all SMs read the same block at once.
    """
    fitting = max(1, int(properties.l2_bytes * _L2_SHARE) // kv_bytes)
    return min(batch_heads, group_size * (fitting if masked else min(fitting, unmasked_kv_heads)))
