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


def grouped_matmul(
    x: Tensor,
    weights: Tensor,
    group_offsets: Tensor,
    *,
    gather: Tensor | None = None,
    scatter: Tensor | None = None,
    row_weights: Tensor | None = None,
    bias: Tensor | None = None,
    out_rows: int | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """y[scatter[r]] = row_weights[r] * (x[gather[r]] weights[g] + bias[g]) of the group g that row r belongs to."""
    groups, _, columns = weights.shape
    given = x if gather is None else x[gather]
    offsets = group_offsets if group_offsets.shape[0] == groups + 1 else offsets_of_counts(group_offsets)
    row = torch.arange(given.shape[0], device=x.device)
    y = given.new_zeros((given.shape[0], columns))
    for group in range(groups):
        mine = ((row >= offsets[group]) & (row < offsets[group + 1]))[:, None]
        product = given @ weights[group]
        y = torch.where(mine, product if bias is None else product + bias[group], y)
    if row_weights is not None:
        y = y * row_weights[:, None]
    y = y.to(x.dtype if out_dtype is None else out_dtype)
    if scatter is None:
        return y
    target = y.new_zeros((y.shape[0] if out_rows is None else out_rows, columns))
    return target.index_copy(0, scatter.long(), y)


def offsets_of_counts(counts: Tensor) -> Tensor:
    """[groups] rows of each group -> [groups + 1] where each begins, and the end."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0, dtype=counts.dtype)])
