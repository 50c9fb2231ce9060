"""Grouped products by torch's own operators: one product for each group."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks.epilogue import Epilogue, Operands, standard
from flashkernel.blocks.gate_up import split_gate_up
from flashkernel.blocks.values import has_values
from flashkernel.ops.matmul.grouped import reference
from flashkernel.ops.matmul.grouped.params import GroupedOptions
from flashkernel.ops.matmul.grouped.reference import as_offsets, as_row_and_column_scales, scattered
from flashkernel.ops.matmul.reference import default_dtype


def grouped_matmul(x: Tensor, weights: Tensor, group_offsets: Tensor, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
    if not has_values(group_offsets):
        return reference.grouped_matmul(x, weights, group_offsets, **options)
    params = GroupedOptions(**options)
    dtype, groups, gather = params.out_dtype or default_dtype(x.dtype), weights.shape[0], params.gather
    if x.device.type == "cpu":
        _check_indices(x.shape[0], params)
    given = x if gather is None else x.view(torch.uint8)[gather].view(x.dtype) if x.dtype.itemsize == 1 else x[gather]
    bounds = _bounds("grouped_matmul", as_offsets(group_offsets, groups), given.shape[0])
    # An activation and scales apply to sums that are not rounded.
    wide = torch.float32 if params.activation is not None or x.dtype.itemsize == 1 else x.dtype
    wide = torch.promote_types(wide, x.dtype) if x.dtype.itemsize > 1 else wide
    row_scale, column_scale = _scales(params, groups)
    chain = Epilogue(standard(False, params.activation, 1.0, False))
    parts, products = [], []
    for group, (begin, end) in enumerate(pairwise(bounds)):
        part = given[begin:end].to(wide) @ weights[group].to(wide)
        if row_scale is not None and column_scale is not None:
            part = part * (row_scale[begin:end] if row_scale.shape[0] > 1 else row_scale)[:, None] * column_scale[group]
        part = part if params.bias is None else part + params.bias[group]
        products.append(part.detach())
        parts.append(chain.run(split_gate_up(part, params.packed) if chain.gated else (part,), Operands()))
    columns = weights.shape[2] // 2 if chain.gated else weights.shape[2]
    after = given.shape[0] - bounds[-1]
    y = torch.cat([*parts, given.new_zeros((after, columns), dtype=parts[0].dtype if parts else dtype)])
    result = scattered(y, dtype, params)
    if not params.return_preactivation:
        return result
    z = torch.cat([*products, given.new_zeros((after, weights.shape[2]), dtype=wide)])
    return result, z.to(x.dtype)


def grouped_weight_gradient(x: Tensor, dz: Tensor, group_offsets: Tensor, *, gather: Tensor | None = None) -> Tensor:
    """One product for each group."""
    if not has_values(group_offsets):
        return reference.grouped_weight_gradient(x, dz, group_offsets, gather=gather)
    given = x if gather is None else x[gather]
    bounds = _bounds("grouped_weight_gradient", group_offsets, given.shape[0])
    products = [given[begin:end].t() @ dz[begin:end] for begin, end in pairwise(bounds)]
    return torch.stack(products) if products else x.new_empty((0, x.shape[1], dz.shape[1]))


def _bounds(function: str, offsets: Tensor, rows: int) -> list[int]:
    """The offsets on the host; ValueError unless they ascend from 0 on, within the rows."""
    bounds: list[int] = offsets.tolist()
    if bounds[:1] != [0] or any(begin > end for begin, end in pairwise([*bounds, rows])):
        raise ValueError(
            f"{function}: group_offsets give bounds {bounds} for {rows} rows; they must ascend from 0 on and end "
            "within the rows"
        )
    return bounds


def _check_indices(tokens: int, params: GroupedOptions) -> None:
    """IndexError for a row that is not there, ValueError for one of the output that is written twice."""
    out_rows = params.out_rows
    if params.scatter is not None and out_rows is None:
        out_rows = params.scatter.shape[0]
    for name, index, rows in (("gather", params.gather, tokens), ("scatter", params.scatter, out_rows)):
        if index is None or rows is None or index.numel() == 0:
            continue
        low, high = (int(one) for one in index.aminmax())
        if low < 0 or high >= rows:
            wrong = low if low < 0 else high
            raise IndexError(f"grouped_matmul: {name} names row {wrong}; there are {rows} rows")
        if name == "scatter" and int(index.long().bincount().max()) > 1:
            raise ValueError(
                "grouped_matmul: scatter names a row of the output twice; its indices must all be different"
            )


def _scales(params: GroupedOptions, groups: int) -> tuple[Tensor | None, Tensor | None]:
    """Scales of the gathered rows, [rows or 1], and of the weights' columns, [groups, N or 1]."""
    if params.x_scale is None or params.weight_scale is None:
        return None, None
    rows, columns = as_row_and_column_scales(params.x_scale, params.weight_scale, groups)
    return rows if params.gather is None or rows.shape[0] == 1 else rows[params.gather], columns
