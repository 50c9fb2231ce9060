"""Matrix products in plain torch: the ground truth, in whatever precision it is given."""

from __future__ import annotations

import torch
from torch import Tensor

from flashkernel.blocks.activation import FORMULAS
from flashkernel.blocks.fp8 import SCALE_BLOCK, expand_scales

WIDE = (torch.float32, torch.float64)


def matmul(
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    scale: float = 1.0,
    out_dtype: torch.dtype | None = None,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
) -> Tensor:
    """scale * activation(A B + bias) + residual, where A and B are multiplied by their scales first."""
    dtype = default_dtype(a.dtype) if out_dtype is None else out_dtype
    if a_scale is not None and b_scale is not None:
        a_scale, b_scale = as_matrices(a_scale, b_scale)
        a, b = dequantized(a, a_scale), dequantized(b, b_scale)
    value = torch.matmul(a if a.dtype.itemsize > 1 else a.float(), b if b.dtype.itemsize > 1 else b.float())
    if bias is not None:
        value = value + bias
    if activation is not None:
        value = FORMULAS[activation](value)
    value = value * scale
    return (value if residual is None else value + residual).to(dtype)


def default_dtype(dtype: torch.dtype) -> torch.dtype:
    """The output's dtype unless one is asked for: the operands', and bfloat16 of 8-bit operands."""
    return dtype if dtype.itemsize > 1 else torch.bfloat16


def as_matrices(a_scale: Tensor, b_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Scales of at least 2 dims: one for all as [1, 1], one for each row of A as [M, 1] and column of B as [1, N]."""
    return (
        a_scale.reshape(-1, 1) if a_scale.ndim < 2 else a_scale,
        b_scale.reshape(1, -1) if b_scale.ndim < 2 else b_scale,
    )


def dequantized(x: Tensor, scale: Tensor) -> Tensor:
    """x times its scales, in the scales' precision. A dim of the scales has one for all, for each, or for every 128."""
    wide = scale.dtype if scale.dtype in WIDE else torch.float32
    group = [SCALE_BLOCK if scale.shape[dim] not in (1, x.shape[dim]) else 1 for dim in (-2, -1)]
    return x.to(wide) * expand_scales(scale.to(wide), group, x.shape)
