"""Grouped products in plain torch: the ground truth, in whatever precision it is given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks.activation import FORMULAS, apply_gate
from flashkernel.blocks.epilogue import Activation, Gate, standard
from flashkernel.blocks.gate_up import split_gate_up
from flashkernel.ops.matmul.grouped.params import GroupedOptions
from flashkernel.ops.matmul.reference import default_dtype, dequantized


def grouped_matmul(x: Tensor, weights: Tensor, group_offsets: Tensor, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
    """y[scatter[r]] = row_weights[r] * activation(x[gather[r]] weights[g] + bias[g]); row r belongs to group g."""
    params = GroupedOptions(**options)
    dtype, groups = params.out_dtype or default_dtype(x.dtype), weights.shape[0]
    if params.x_scale is not None and params.weight_scale is not None:
        rows_scale, columns_scale = as_row_and_column_scales(params.x_scale, params.weight_scale, groups)
        x, weights = dequantized(x, rows_scale[:, None]), dequantized(weights, columns_scale[:, None, :])
    elif x.dtype.itemsize == 1:
        x, weights = x.float(), weights.float()
    given = x if params.gather is None else x[params.gather]
    offsets = as_offsets(group_offsets, groups)
    row = torch.arange(given.shape[0], device=x.device)
    z = given.new_zeros((given.shape[0], weights.shape[2]))
    for group in range(groups):
        mine = ((row >= offsets[group]) & (row < offsets[group + 1]))[:, None]
        product = given @ weights[group]
        z = torch.where(mine, product if params.bias is None else product + params.bias[group], z)
    y = torch.where((row < offsets[-1])[:, None], activated(z, params.activation, params.packed), 0)
    result = scattered(y, dtype, params)
    return (result, z.detach()) if params.return_preactivation else result


def grouped_weight_gradient(x: Tensor, dz: Tensor, group_offsets: Tensor, *, gather: Tensor | None = None) -> Tensor:
    """dW[g] = the sum over the rows r of group g of x[gather[r]]^T dz[r]."""
    given = x if gather is None else x[gather]
    row = torch.arange(dz.shape[0], device=x.device)
    products = []
    for group in range(group_offsets.shape[0] - 1):
        mine = ((row >= group_offsets[group]) & (row < group_offsets[group + 1]))[:, None]
        products.append(torch.where(mine, given, 0).t() @ torch.where(mine, dz, 0))
    return torch.stack(products) if products else x.new_empty((0, x.shape[1], dz.shape[1]))


def scattered(y: Tensor, dtype: torch.dtype, params: GroupedOptions) -> Tensor:
    """Rows of the groups, multiplied by their weights, in `dtype`, where they belong in the output."""
    if params.row_weights is not None:
        y = y * params.row_weights[:, None]
    y = y.to(dtype)
    if params.scatter is None:
        return y
    target = y.new_zeros((y.shape[0] if params.out_rows is None else params.out_rows, y.shape[1]))
    return target.index_copy(0, params.scatter.long(), y)


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


def as_offsets(given: Tensor, groups: int) -> Tensor:
    """[groups + 1] where each group begins, and the end; of [groups] rows of each group, or of the offsets."""
    if given.shape[0] == groups + 1:
        return given
    return torch.cat([given.new_zeros(1), given.cumsum(0, dtype=given.dtype)])
