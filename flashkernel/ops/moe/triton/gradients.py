"""What the experts' backward pass does between its grouped products.

With z the up product, h = activation(z), y_r = h_r W_down + b and out[t] = sum of w_r y_r over the token's rows r:

    dh'_r = dout[t] W_down^T          a grouped product, without the weight
    dw_r  = dout[t] . y_r = dh'_r . h_r + dout[t] . b      so that y need not be stored
    dz_r  = activation'(z_r) w_r dh'_r
    dW_down = sum of (w_r h_r)^T dout[t]
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashkernel.blocks.epilogue_triton import pull_back_activation
from flashkernel.core import tune
from flashkernel.core.arguments import near
from flashkernel.core.launch import launch


@triton.jit
def row_weights_kernel(
    weights, positions, row_weights, slots, weight_strides, SLOTS: tl.constexpr, BLOCK: tl.constexpr
):
    """row_weights[positions[t, j]] = weights[t, j]."""
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(positions + slot, mask=slot < slots, other=-1)
    offset = (slot // SLOTS).to(tl.int64) * weight_strides[0] + slot % SLOTS * weight_strides[1]
    value = tl.load(weights + offset, mask=row >= 0, other=0.0)
    tl.store(row_weights + row, value.to(tl.float32), mask=row >= 0)


def by_rows(weights: Tensor, positions: Tensor, rows: int) -> Tensor:
    """Returns the weights [tokens, slots] in the order of the rows, float32 [rows]; NaN behind the last row used."""
    made = torch.full((rows,), torch.nan, device=weights.device)
    if rows and positions.numel():
        block, weights = 512, near(weights)
        launch(
            row_weights_kernel, (tune.ceil_div(positions.numel(), block),), weights, positions, made,
            positions.numel(), weights.stride(), SLOTS=positions.shape[1], BLOCK=block, num_warps=4,
        )  # fmt: skip
    return made


@triton.jit
def expert_gradient_kernel(
    z, dh, row_weights, offsets, dz, weighted, row_products, rows, experts, columns,
    ACTIVATION: tl.constexpr, GATE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dz, weight * activation(z) and the products dh . activation(z) of BLOCK_M rows; zeros behind the last group.

    dz may be z itself: a program reads a tile before it writes it.
    """
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    in_rows = row < rows
    real = row < tl.load(offsets + experts)
    weight = tl.load(row_weights + row, mask=real & in_rows, other=0.0)[:, None]
    wide = row.to(tl.int64)[:, None]
    product = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in tl.range(0, columns, BLOCK_N):
        column = first + tl.arange(0, BLOCK_N)
        written = in_rows[:, None] & (column < columns)[None, :]
        inside = written & real[:, None]
        offset = wide * columns + column[None, :]
        gradient = tl.load(dh + offset, mask=inside, other=0.0).to(tl.float32)
        if GATE == "halves":
            z_offset = wide * (2 * columns) + column[None, :]
            gate = tl.load(z + z_offset, mask=inside, other=0.0).to(tl.float32)
            up = tl.load(z + z_offset + columns, mask=inside, other=0.0).to(tl.float32)
        elif GATE == "interleaved":
            both = 2 * first + tl.arange(0, 2 * BLOCK_N)
            in_both = in_rows[:, None] & (both < 2 * columns)[None, :]
            z_offset = wide * (2 * columns) + both[None, :]
            pair = tl.load(z + z_offset, mask=in_both & real[:, None], other=0.0).to(tl.float32)
            gate, up = tl.split(tl.reshape(pair, [BLOCK_M, BLOCK_N, 2]))
        else:
            z_offset = offset
            gate = tl.load(z + z_offset, mask=inside, other=0.0).to(tl.float32)
            up = gate
        value, dgate, dup = pull_back_activation(gradient, gate, up, ACTIVATION)
        product += gradient * value
        dgate, dup = tl.where(real[:, None], dgate * weight, 0.0), tl.where(real[:, None], dup * weight, 0.0)
        if GATE == "interleaved":
            pair = tl.reshape(tl.join(dgate, dup), [BLOCK_M, 2 * BLOCK_N])
            tl.store(dz + z_offset, pair.to(dz.dtype.element_ty), mask=in_both)
        else:
            tl.store(dz + z_offset, dgate.to(dz.dtype.element_ty), mask=written)
            if GATE == "halves":
                tl.store(dz + z_offset + columns, dup.to(dz.dtype.element_ty), mask=written)
        if weighted is not None:
            hidden = tl.where(real[:, None], value * weight, 0.0)
            tl.store(weighted + offset, hidden.to(weighted.dtype.element_ty), mask=written)
    tl.store(row_products + row, tl.sum(product, 1), mask=in_rows)


def expert_gradient(
    z: Tensor, dh: Tensor, row_weights: Tensor, offsets: Tensor, activation: str, gate: str, in_place: bool,
    of_down: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """Returns (dz, weight * activation(z) or None, dh . activation(z) by rows in float32).

    Args:
        z: [rows, N], contiguous.
        dh: [rows, I], contiguous: the gradient of activation(z), without the weight.
        row_weights: float32 [rows].
        offsets: int32 [experts + 1].
        activation: The text of an epilogue's piece.
        gate: "halves", "interleaved" or "".
        in_place: dz takes the memory of z.
        of_down: Whether the down weight's gradient needs the second.
    """
    rows, columns = dh.shape
    dz = z if in_place else torch.empty_like(z)
    weighted = torch.empty_like(dh) if of_down else None
    products = torch.empty(rows, dtype=torch.float32, device=z.device)
    if rows:
        launch(
            expert_gradient_kernel, (tune.ceil_div(rows, 4),), z, dh, row_weights, offsets, dz, weighted, products,
            rows, offsets.shape[0] - 1, columns, ACTIVATION=activation, GATE=gate, BLOCK_M=4,
            BLOCK_N=min(512, max(16, tune.power_of_2(columns))), num_warps=4,
        )  # fmt: skip
    return dz, weighted, products


@triton.jit
def slot_gradient_kernel(
    dout, row_products, positions, experts_of_slots, bias, dweights, columns, dout_stride, bias_strides,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dweights[t, j] = row_products[positions[t, j]] + dout[t] . bias[expert]; 0 for a slot without a row."""
    token = tl.program_id(0).to(tl.int64)
    for slot in tl.range(0, SLOTS):
        row = tl.load(positions + token * SLOTS + slot)
        total = 0.0
        if row >= 0:
            total = tl.load(row_products + row)
            if bias is not None:
                expert = tl.load(experts_of_slots + token * SLOTS + slot).to(tl.int64)
                product = tl.zeros([BLOCK], tl.float32)
                for first in tl.range(0, columns, BLOCK):
                    column = first + tl.arange(0, BLOCK)
                    inside = column < columns
                    gradient = tl.load(dout + token * dout_stride + column, mask=inside, other=0.0).to(tl.float32)
                    there = bias + expert * bias_strides[0] + column * bias_strides[1]
                    product += gradient * tl.load(there, mask=inside, other=0.0).to(tl.float32)
                total += tl.sum(product, 0)
        tl.store(dweights + token * SLOTS + slot, total)


def slot_gradient(
    dout: Tensor, row_products: Tensor, positions: Tensor, experts: Tensor, down_bias: Tensor | None
) -> Tensor:
    """Returns the weights' gradient, float32 [tokens, slots]; dout has unit stride along its columns."""
    dweights = torch.empty(positions.shape, dtype=torch.float32, device=dout.device)
    columns, down_bias = dout.shape[1], None if down_bias is None else near(down_bias)
    if dweights.numel():
        launch(
            slot_gradient_kernel, (positions.shape[0],), dout, row_products, positions, experts, down_bias, dweights,
            columns, dout.stride(0), (0, 0) if down_bias is None else down_bias.stride(), SLOTS=positions.shape[1],
            BLOCK=min(1024, max(16, tune.power_of_2(columns))), num_warps=4,
        )  # fmt: skip
    return dweights


@triton.jit
def bias_gradient_kernel(
    values, gather, row_weights, offsets, total, row_stride, columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """total[expert] = sum over the expert's rows r of row_weights[r] * values[gather[r]], for BLOCK_N columns."""
    expert, column = tl.program_id(0), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin, end = tl.load(offsets + expert), tl.load(offsets + expert + 1)
    result = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in tl.range(begin, end, BLOCK_M):
        row = first + tl.arange(0, BLOCK_M)
        in_rows = row < end
        source = row if gather is None else tl.load(gather + row, mask=in_rows, other=0)
        offset = source.to(tl.int64)[:, None] * row_stride + column[None, :]
        value = tl.load(values + offset, mask=in_rows[:, None] & (column < columns)[None, :], other=0.0).to(tl.float32)
        if row_weights is not None:
            value *= tl.load(row_weights + row, mask=in_rows, other=0.0)[:, None]
        result += value
    tl.store(total + expert.to(tl.int64) * columns + column, tl.sum(result, 0), mask=column < columns)


def bias_gradient(values: Tensor, gather: Tensor | None, row_weights: Tensor | None, offsets: Tensor) -> Tensor:
    """Returns float32 [experts, columns]: the sums over each expert's rows. values has unit stride along columns."""
    experts, columns = offsets.shape[0] - 1, values.shape[1]
    total = torch.empty((experts, columns), dtype=torch.float32, device=values.device)
    if total.numel():
        block_n = 64
        launch(
            bias_gradient_kernel, (experts, tune.ceil_div(columns, block_n)), values, gather, row_weights, offsets,
            total, values.stride(0), columns, BLOCK_M=32, BLOCK_N=block_n, num_warps=4,
        )  # fmt: skip
    return total
