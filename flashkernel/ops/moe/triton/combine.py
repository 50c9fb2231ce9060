"""Sums over a token's rows, in the order of its slots: nothing is added with atomics, and results repeat exactly."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashkernel.core import tune
from flashkernel.core.arguments import near
from flashkernel.core.launch import launch


@triton.jit
def combine_kernel(
    rows, positions, weights, out, columns, row_stride, split_stride, weight_strides, SLOTS: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[t] = sum over slots j of weights[t, j] * rows[positions[t, j]], for BLOCK columns; float32 sums.

    A row is the sum of its SPLITS parts.
    """
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.range(0, SLOTS):
        row = tl.load(positions + token * SLOTS + slot)
        if row >= 0:
            value = tl.zeros([BLOCK], tl.float32)
            for split in tl.static_range(SPLITS):
                offset = row.to(tl.int64) * row_stride + split * split_stride + column
                value += tl.load(rows + offset, mask=inside, other=0.0).to(tl.float32)
            if weights is not None:
                value *= tl.load(weights + token * weight_strides[0] + slot * weight_strides[1]).to(tl.float32)
            total += value
    tl.store(out + token * columns + column, total.to(out.dtype.element_ty), mask=inside)


def combine(rows: Tensor, positions: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns [tokens, columns]: the sum of each token's rows, weighted where there are weights.

    Args:
        rows: [rows, columns] with unit stride along the columns, or [splits, rows, columns]: parts to be added.
        positions: int32 [tokens, slots], contiguous: rows; -1 where a slot has none.
        weights: [tokens, slots], any strides, or None.
        dtype: The result's dtype.
    """
    tokens, slots = positions.shape
    parts = rows if rows.ndim == 3 else rows[None]
    columns = parts.shape[2]
    out = torch.empty((tokens, columns), dtype=dtype, device=rows.device)
    if out.numel():
        weights = None if weights is None else near(weights)
        # Few tokens have few programs: narrow ones, so that every SM has some.
        block = min(1024 if tokens > 64 else 256, max(16, tune.power_of_2(columns)))
        launch(
            combine_kernel, (tokens, tune.ceil_div(columns, block)), parts, positions, weights, out, columns,
            parts.stride(1), parts.stride(0), (0, 0) if weights is None else weights.stride(), SLOTS=slots,
            SPLITS=parts.shape[0], BLOCK=block, num_warps=4 if block > 256 else 1,
        )  # fmt: skip
    return out
