"""Rotary attention in plain torch: rotate q and k, then attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks.rope import rotate
from flashkernel.ops.attention import reference


def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """(q, k), rotated by their positions: key j is at j, query i at i + seqlen_k - seqlen_q; none below 0 are rotated.

    cos and sin are (positions, rotary_dim / 2). Products are in their dtype, and the result is rounded once.
    """
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    first, width = seqlen_k - seqlen_q, 2 * cos.shape[1]
    before = min(max(0, -first), seqlen_q)  # queries before the first key
    cos, sin = (table[None, :seqlen_k, None] for table in (cos, sin))  # [1, Sk, 1, pairs]
    k = rotate(k.to(cos.dtype), cos, sin, width, interleaved).to(k.dtype)
    cos, sin = (table[:, max(0, first) :] for table in (cos, sin))
    rotated_queries = rotate(q[:, before:].to(cos.dtype), cos, sin, width, interleaved).to(q.dtype)
    return torch.cat((q[:, :before], rotated_queries), 1), k


def rotary_attention(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of the rotated q and k, with every score in memory."""
    return reference.attention(*rotated(q, k, cos, sin, interleaved), v, **options)
