"""What a grouped product's backward pass does beside its two products, in Triton, for all kernel modules.

- `product_gradient`: dz, by rows of the groups, of dy: scatter, row weights and activation undone in one pass.
- `sum_by_group`: the bias's gradient.
- `sum_repeated_rows`: the gradient of rows of x that were gathered several times, added in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashkernel.blocks.activation_triton import activate, clamp_gate, clamp_up
from flashkernel.blocks.epilogue import Activation, Epilogue, Gate
from flashkernel.core import tune
from flashkernel.core.launch import launch

_TILE = (4, 512)  # rows and columns that a program works on at a time


@triton.jit
def product_gradient_kernel(
    dy, preactivation, dz, row_weight_gradient, offsets, scatter, row_weights, dy_stride, rows, groups, columns, alpha,
    limit, KIND: tl.constexpr, GATE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dz [rows, columns, or with a gate 2 * columns] of dy, for BLOCK_M rows; zero behind the last group."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    in_rows = row < rows
    grouped = row < tl.load(offsets + groups)
    wide_row = row.to(tl.int64)
    dy_row = wide_row if scatter is None else tl.load(scatter + row, mask=in_rows, other=0).to(tl.int64)
    weight = 1.0 if row_weights is None else tl.load(row_weights + row, mask=in_rows, other=0.0)[:, None]
    product = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)  # dy times the activation's value
    for first in tl.range(0, columns, BLOCK_N):
        column = first + tl.arange(0, BLOCK_N)
        inside = (in_rows & grouped)[:, None] & (column < columns)[None, :]
        written = in_rows[:, None] & (column < columns)[None, :]
        gradient = tl.load(dy + dy_row[:, None] * dy_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        offset = wide_row[:, None] * columns + column[None, :]
        if GATE == "":
            if preactivation is None:
                value, derivative = 0.0, 1.0
            else:
                z = tl.load(preactivation + offset, mask=inside, other=0.0).to(tl.float32)
                if KIND == "":
                    value, derivative = z, 1.0
                else:
                    value, derivative = activate(z, KIND, alpha)
            tl.store(dz + offset, (gradient * derivative * weight).to(dz.dtype.element_ty), mask=written)
        else:
            if GATE == "halves":
                gate_offset = wide_row[:, None] * (2 * columns) + column[None, :]
                gate = tl.load(preactivation + gate_offset, mask=inside, other=0.0).to(tl.float32)
                up = tl.load(preactivation + gate_offset + columns, mask=inside, other=0.0).to(tl.float32)
            else:
                both = 2 * first + tl.arange(0, 2 * BLOCK_N)
                in_both = in_rows[:, None] & (both < 2 * columns)[None, :]
                pair_offset = wide_row[:, None] * (2 * columns) + both[None, :]
                pair = tl.load(preactivation + pair_offset, mask=in_both & grouped[:, None], other=0.0)
                gate, up = tl.split(tl.reshape(pair.to(tl.float32), [BLOCK_M, BLOCK_N, 2]))
            value, derivative = activate(clamp_gate(gate, limit, KIND), KIND, alpha)
            factor = clamp_up(up, limit, KIND)
            dgate = gradient * derivative * factor * weight
            dup = gradient * value * weight
            value *= factor
            if KIND == "gpt_oss":
                dgate = tl.where(gate > limit, 0.0, dgate)
                dup = tl.where((up > limit) | (up < -limit), 0.0, dup)
            if GATE == "halves":
                tl.store(dz + gate_offset, dgate.to(dz.dtype.element_ty), mask=written)
                tl.store(dz + gate_offset + columns, dup.to(dz.dtype.element_ty), mask=written)
            else:
                pair = tl.reshape(tl.join(dgate, dup), [BLOCK_M, 2 * BLOCK_N])
                tl.store(dz + pair_offset, pair.to(dz.dtype.element_ty), mask=in_both)
        if row_weight_gradient is not None:
            product += gradient * value
    if row_weight_gradient is not None:
        tl.store(row_weight_gradient + row, tl.sum(product, 1), mask=in_rows)


def product_gradient(
    dy: Tensor, preactivation: Tensor | None, offsets: Tensor, scatter: Tensor | None, row_weights: Tensor | None,
    activation: str, gate: str, rows: int, dtype: torch.dtype, of_row_weights: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Returns (dz [rows, N], the row weights' gradient [rows] in float32 or None), by rows of the groups.

    Args:
        dy: [out_rows, columns] with unit stride along its columns.
        preactivation: z [rows, N], contiguous; None where neither an activation nor the row weights' gradient needs it.
        offsets: As in `GroupedMatmulKernels`, as scatter and row_weights.
        activation: As in `GroupedParams`, as gate.
        dtype: dz's dtype.
        of_row_weights: Whether the row weights' gradient is wanted.
    """
    columns = dy.shape[1]
    dz = torch.empty((rows, 2 * columns if gate else columns), dtype=dtype, device=dy.device)
    weight_gradient = torch.empty(rows, dtype=torch.float32, device=dy.device) if of_row_weights else None
    if rows == 0:
        return dz, weight_gradient
    pieces = Epilogue.parse(activation).pieces
    piece = pieces[0] if pieces else None
    kind = piece.kind if isinstance(piece, (Activation, Gate)) else ""
    alpha, limit = (piece.alpha, piece.limit) if isinstance(piece, Gate) else (0.0, 0.0)
    block_m, block_n = _TILE
    launch(
        product_gradient_kernel, (tune.ceil_div(rows, block_m),),
        dy, preactivation, dz, weight_gradient, offsets, scatter, row_weights, dy.stride(0), rows,
        offsets.shape[0] - 1, columns, float(alpha), float(limit),
        KIND=kind, GATE=gate, BLOCK_M=block_m, BLOCK_N=min(block_n, max(16, tune.power_of_2(columns))), num_warps=4,
    )  # fmt: skip
    return dz, weight_gradient


@triton.jit
def sum_by_group_kernel(dz, total, offsets, row_stride, columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """total[group, columns of this program] = the sum over the group's rows."""
    group, column = tl.program_id(0), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin, end = tl.load(offsets + group), tl.load(offsets + group + 1)
    value = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in tl.range(begin, end, BLOCK_M):
        row = first + tl.arange(0, BLOCK_M)
        inside = (row < end)[:, None] & (column < columns)[None, :]
        value += tl.load(dz + row.to(tl.int64)[:, None] * row_stride + column[None, :], mask=inside, other=0.0)
    tl.store(total + group.to(tl.int64) * columns + column, tl.sum(value, 0), mask=column < columns)


def sum_by_group(dz: Tensor, offsets: Tensor) -> Tensor:
    """Returns [groups, columns] in float32: the sums of dz [rows, columns] over the rows of each group."""
    groups, columns = offsets.shape[0] - 1, dz.shape[1]
    total = torch.empty((groups, columns), dtype=torch.float32, device=dz.device)
    if total.numel():
        block_m, block_n = 32, 64
        launch(
            sum_by_group_kernel, (groups, tune.ceil_div(columns, block_n)), dz, total, offsets, dz.stride(0), columns,
            BLOCK_M=block_m, BLOCK_N=block_n, num_warps=4,
        )  # fmt: skip
    return total


@triton.jit
def sum_repeated_rows_kernel(rows, order, starts, total, columns, BLOCK_N: tl.constexpr):
    """total[token] = the sum of rows[order[i]] for i from starts[token] to starts[token + 1]."""
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin, end = tl.load(starts + token), tl.load(starts + token + 1)
    value = tl.zeros([BLOCK_N], tl.float32)
    for offset in tl.range(begin, end):
        row = tl.load(order + offset).to(tl.int64)
        value += tl.load(rows + row * columns + column, mask=column < columns, other=0.0).to(tl.float32)
    tl.store(total + token * columns + column, value.to(total.dtype.element_ty), mask=column < columns)


def sum_repeated_rows(rows: Tensor, gather: Tensor, tokens: int) -> Tensor:
    """Returns [tokens, columns]: the sum of the rows r with gather[r] = token, in float32 and in the order of r.

    A stable sort of the index gives each token's rows; each token is then written once. It costs a read of the rows and
    a write of the sums. Rows are contiguous.
    """
    columns = rows.shape[1]
    total = torch.empty((tokens, columns), dtype=rows.dtype, device=rows.device)
    if total.numel():
        by_token, order = torch.sort(gather, stable=True)
        bounds = torch.arange(tokens + 1, dtype=gather.dtype, device=gather.device)
        starts = torch.searchsorted(by_token, bounds, out_int32=True)
        block_n = min(1024, max(16, tune.power_of_2(columns)))
        launch(
            sum_repeated_rows_kernel, (tokens, tune.ceil_div(columns, block_n)), rows, order, starts, total, columns,
            BLOCK_N=block_n, num_warps=4,
        )  # fmt: skip
    return total
