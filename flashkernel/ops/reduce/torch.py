"""Reductions by torch's own operators: the CPU default."""

from __future__ import annotations

import torch
from torch import Tensor

from flashkernel.blocks.values import has_values
from flashkernel.ops.reduce.reference import NOTHING, visible_pairs


def sum(x: Tensor, *, keepdim: bool = False) -> Tensor:
    return x.sum(-1, keepdim=keepdim)  # torch adds halves in float32


def mean(x: Tensor, *, keepdim: bool = False) -> Tensor:
    return x.mean(-1, keepdim=keepdim)


def max(x: Tensor, *, keepdim: bool = False) -> Tensor:
    return x.amax(-1, keepdim=keepdim)


def logsumexp(x: Tensor, *, keepdim: bool = False) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    nothing = _fully_masked_rows(wide)
    if nothing is None:
        return torch.logsumexp(wide, -1, keepdim=keepdim).to(x.dtype)
    # Torch's own gradient is NaN there.
    total = torch.logsumexp(wide.masked_fill(nothing, 0.0), -1, keepdim=True).masked_fill(nothing, NOTHING)
    return (total if keepdim else total.squeeze(-1)).to(x.dtype)


def softmax(x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0, causal: bool = False) -> Tensor:
    # Torch's softmax rounds once, at the end; a scale must not round before it.
    scores = x if scale == 1.0 else x.to(torch.promote_types(x.dtype, torch.float32)) * scale
    visible = visible_pairs(x, mask, causal)
    if visible is not None:
        scores = scores.masked_fill(~visible, NOTHING)
    nothing = _fully_masked_rows(scores)
    if nothing is None:
        return torch.softmax(scores, -1).to(x.dtype)
    # Torch's own answer is NaN there.
    return torch.softmax(scores.masked_fill(nothing, 0.0), -1).masked_fill(nothing, 0.0).to(x.dtype)


def _fully_masked_rows(scores: Tensor) -> Tensor | None:
    """Which rows hold nothing but -inf, [..., 1]; None where a CPU, which can look for free, sees that none does."""
    if scores.shape[-1] == 0:
        return None
    nothing = torch.isneginf(scores.detach().amax(-1, keepdim=True))
    looks = scores.device.type == "cpu" and has_values(scores)
    return None if looks and not bool(nothing.any()) else nothing


def weighted_sum(x: Tensor, weight: Tensor) -> Tensor:
    wide = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    return torch.matmul(x.to(wide), weight.to(wide)).to(x.dtype)
