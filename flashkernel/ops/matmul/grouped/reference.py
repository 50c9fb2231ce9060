"""Grouped products in plain torch: the ground truth, in whatever precision it is given."""

from __future__ import annotations

import torch
from torch import Tensor

from flashkernel.blocks.activation import FORMULAS, apply_gate
from flashkernel.blocks.epilogue import Activation, Gate, standard
from flashkernel.blocks.gate_up import split_gate_up
from flashkernel.ops.matmul.reference import default_dtype, dequantized


def grouped_matmul(
    x: Tensor,
    weights: Tensor,
    group_offsets: Tensor,
    *,
    gather: Tensor | None = None,
    scatter: Tensor | None = None,
    row_weights: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | Activation | Gate | None = None,
    packed: str = "halves",
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    out_rows: int | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """y[scatter[r]] = row_weights[r] * activation(x[gather[r]] weights[g] + bias[g]); row r belongs to group g."""
    dtype = default_dtype(x.dtype) if out_dtype is None else out_dtype
    groups = weights.shape[0]
    if x_scale is not None and weight_scale is not None:
        rows_scale, columns_scale = as_row_and_column_scales(x_scale, weight_scale, groups)
        x, weights = dequantized(x, rows_scale[:, None]), dequantized(weights, columns_scale[:, None, :])
    elif x.dtype.itemsize == 1:
        x, weights = x.float(), weights.float()
    given = x if gather is None else x[gather]
    offsets = group_offsets if group_offsets.shape[0] == groups + 1 else offsets_of_counts(group_offsets)
    row = torch.arange(given.shape[0], device=x.device)
    z = given.new_zeros((given.shape[0], weights.shape[2]))
    for group in range(groups):
        mine = ((row >= offsets[group]) & (row < offsets[group + 1]))[:, None]
        product = given @ weights[group]
        z = torch.where(mine, product if bias is None else product + bias[group], z)
    y = torch.where((row < offsets[-1])[:, None], activated(z, activation, packed), 0)
    if row_weights is not None:
        y = y * row_weights[:, None]
    y = y.to(dtype)
    if scatter is None:
        return y
    target = y.new_zeros((y.shape[0] if out_rows is None else out_rows, y.shape[1]))
    return target.index_copy(0, scatter.long(), y)


def activated(z: Tensor, activation: str | Activation | Gate | None, packed: str) -> Tensor:
    """activation(z); of a gate, gate and up are packed in z."""
    for piece in standard(False, activation, 1.0, False):
        if isinstance(piece, Gate):
            return apply_gate(FORMULAS, piece.kind, *split_gate_up(z, packed), piece.alpha, piece.limit)
        if isinstance(piece, Activation):
            return FORMULAS[piece.kind](z)
    return z


def as_row_and_column_scales(x_scale: Tensor, weight_scale: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Scales as vectors: [tokens or 1] of x's rows, [groups, N or 1] of the weights' columns."""
    columns = weight_scale.reshape(-1, 1) if weight_scale.ndim < 2 else weight_scale
    return x_scale.reshape(-1), columns.expand(groups, columns.shape[1])


def offsets_of_counts(counts: Tensor) -> Tensor:
    """[groups] rows of each group -> [groups + 1] where each begins, and the end."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0, dtype=counts.dtype)])
