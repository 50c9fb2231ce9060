"""Normalization in plain torch: the ground truth, in whatever precision it is given."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, residual: Tensor | None = None, *,
    eps: float = 1e-6, offset: float = 0.0,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """y = x / sqrt(mean(x^2) + eps) * (weight + offset) + bias, of x + residual where a residual is given."""
    total = x if residual is None else x + residual
    y = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps)
    y = _affine(y, weight, bias, offset).to(x.dtype)
    return y if residual is None else (y, total)


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, residual: Tensor | None = None, *,
    eps: float = 1e-5,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, of x + residual where a residual is given."""
    total = x if residual is None else x + residual
    centered = total - total.mean(-1, keepdim=True)
    y = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps)
    y = _affine(y, weight, bias, 0.0).to(x.dtype)
    return y if residual is None else (y, total)


def _affine(y: Tensor, weight: Tensor | None, bias: Tensor | None, offset: float) -> Tensor:
    if weight is not None:
        y = y * (weight + offset)
    return y if bias is None else y + bias
