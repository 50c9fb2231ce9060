"""Grouped products in plain torch: the ground truth, in whatever precision it is given."""

from __future__ import annotations

import torch
from torch import Tensor


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
