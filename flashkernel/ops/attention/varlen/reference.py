"""Attention over packed sequences in plain torch: attention with the sequences hidden from each other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks.mask import Mask, tensor_mask
from flashkernel.ops.attention import reference
from flashkernel.ops.attention.varlen.params import sides


def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = None, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """`reference.attention` of q (tokens, heads, head_dim), with a mask that is built sequence by sequence."""
    visible = torch.zeros(q.shape[0], k.shape[0], dtype=torch.bool, device=q.device)
    mask: Mask | None = options.pop("mask", None)
    left, right = sides(options.pop("causal", False), options.pop("window", None))
    starts_q = cu_seqlens_q.tolist()
    starts_k = starts_q if cu_seqlens_k is None else cu_seqlens_k.tolist()
    for first_q, last_q, first_k, last_k in zip(starts_q, starts_q[1:], starts_k, starts_k[1:]):
        length_q, length_k = last_q - first_q, last_k - first_k
        position = torch.arange(length_k - length_q, length_k, device=q.device).view(-1, 1)  # of each query
        key = torch.arange(length_k, device=q.device)
        seen = torch.ones(length_q, length_k, dtype=torch.bool, device=q.device)
        if right is not None:
            seen &= key <= position + right
        if left is not None:
            seen &= key >= position - left
        visible[first_q:last_q, first_k:last_k] = seen
    whole = tensor_mask(visible[None, None])
    found = reference.attention(q[None], k[None], v[None], mask=whole if mask is None else whole & mask, **options)
    return (found[0][0], found[1][0]) if isinstance(found, tuple) else found[0]
