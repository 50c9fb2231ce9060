"""Grouped products by torch's own operators: one product for each group."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks.epilogue import Activation, Epilogue, Gate, Operands, standard
from flashkernel.blocks.gate_up import split_gate_up
from flashkernel.ops.matmul.grouped import reference
from flashkernel.ops.matmul.grouped.reference import as_row_and_column_scales, offsets_of_counts
from flashkernel.ops.matmul.reference import default_dtype


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
    options: dict[str, Any] = {
        "gather": gather, "scatter": scatter, "row_weights": row_weights, "bias": bias, "activation": activation,
        "packed": packed, "x_scale": x_scale, "weight_scale": weight_scale, "out_rows": out_rows,
        "out_dtype": out_dtype,
    }  # fmt: skip
    if torch.compiler.is_compiling():  # offsets on the host would break the graph
        return reference.grouped_matmul(x, weights, group_offsets, **options)
    dtype = default_dtype(x.dtype) if out_dtype is None else out_dtype
    groups = weights.shape[0]
    offsets = group_offsets if group_offsets.shape[0] == groups + 1 else offsets_of_counts(group_offsets)
    given = x if gather is None else x.view(torch.uint8)[gather].view(x.dtype) if x.dtype.itemsize == 1 else x[gather]
    bounds = offsets.tolist()  # a host sync
    if any(begin > end for begin, end in pairwise([0, *bounds, given.shape[0]])):
        raise ValueError(
            f"grouped_matmul: group_offsets give bounds {bounds} for {given.shape[0]} rows; they must ascend from 0 on "
            "and end within the rows"
        )
    # An activation and scales apply to sums that are not rounded.
    wide = torch.float32 if activation is not None or x.dtype.itemsize == 1 else x.dtype
    wide = torch.promote_types(wide, x.dtype) if x.dtype.itemsize > 1 else wide
    row_scale, column_scale = _scales(x_scale, weight_scale, gather, groups)
    parts = []
    for group, (begin, end) in enumerate(pairwise(bounds)):
        part = given[begin:end].to(wide) @ weights[group].to(wide)
        if row_scale is not None and column_scale is not None:
            part = part * (row_scale[begin:end] if row_scale.shape[0] > 1 else row_scale)[:, None] * column_scale[group]
        part = part if bias is None else part + bias[group]
        parts.append(_activated(part, activation, packed))
    gated = Epilogue(standard(False, activation, 1.0, False)).gated
    columns = weights.shape[2] // 2 if gated else weights.shape[2]
    after = given.shape[0] - bounds[-1]
    y = torch.cat([*parts, given.new_zeros((after, columns), dtype=parts[0].dtype if parts else dtype)])
    if row_weights is not None:
        y = y * row_weights[:, None]
    y = y.to(dtype)
    if scatter is None:
        return y
    target = y.new_zeros((y.shape[0] if out_rows is None else out_rows, columns))
    return target.index_copy(0, scatter.long(), y)


def _scales(
    x_scale: Tensor | None, weight_scale: Tensor | None, gather: Tensor | None, groups: int
) -> tuple[Tensor | None, Tensor | None]:
    """Scales of the gathered rows, [rows or 1], and of the weights' columns, [groups, N or 1]."""
    if x_scale is None or weight_scale is None:
        return None, None
    rows, columns = as_row_and_column_scales(x_scale, weight_scale, groups)
    return rows if gather is None or rows.shape[0] == 1 else rows[gather], columns


def _activated(z: Tensor, activation: str | Activation | Gate | None, packed: str) -> Tensor:
    chain = Epilogue(standard(False, activation, 1.0, False))
    return chain.run(split_gate_up(z, packed) if chain.gated else (z,), Operands())
