"""Grouped products by torch's own operators: one product for each group."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from flashkernel.ops.matmul.grouped import reference
from flashkernel.ops.matmul.grouped.reference import offsets_of_counts


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
    options = {
        "gather": gather, "scatter": scatter, "row_weights": row_weights, "bias": bias, "out_rows": out_rows,
        "out_dtype": out_dtype,
    }  # fmt: skip
    if torch.compiler.is_compiling():  # offsets on the host would break the graph
        return reference.grouped_matmul(x, weights, group_offsets, **options)  # type: ignore[arg-type]
    groups = weights.shape[0]
    offsets = group_offsets if group_offsets.shape[0] == groups + 1 else offsets_of_counts(group_offsets)
    given = x if gather is None else x[gather]
    bounds = offsets.tolist()  # a host sync
    if any(begin > end for begin, end in pairwise([0, *bounds, given.shape[0]])):
        raise ValueError(
            f"grouped_matmul: group_offsets give bounds {bounds} for {given.shape[0]} rows; they must ascend from 0 on "
            "and end within the rows"
        )
    parts = []
    for group, (begin, end) in enumerate(pairwise(bounds)):
        product = given[begin:end] @ weights[group]
        parts.append(product if bias is None else product + bias[group])
    after = given.shape[0] - bounds[-1]
    y = torch.cat([*parts, given.new_zeros((after, weights.shape[2]), dtype=parts[0].dtype if parts else x.dtype)])
    if row_weights is not None:
        y = y * row_weights[:, None]
    y = y.to(x.dtype if out_dtype is None else out_dtype)
    if scatter is None:
        return y
    target = y.new_zeros((y.shape[0] if out_rows is None else out_rows, weights.shape[2]))
    return target.index_copy(0, scatter.long(), y)
