"""Grouped products: one launch over `groups` products whose row counts only the GPU knows.

Every program reads all offsets, counts the tiles of each group, and finds the group of each of its tiles by comparing
the tile's index with the running count. Nothing depends on values that the host would have to wait for.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashkernel.blocks.epilogue_triton import apply_epilogue
from flashkernel.core import device, tune
from flashkernel.core.launch import launch
from flashkernel.ops.matmul.configs import GROUPED
from flashkernel.ops.matmul.grouped.params import GroupedParams, GroupedTensors
from flashkernel.ops.matmul.tiles_triton import Operand, TileAccess, load_tile, tile_position
from flashkernel.ops.matmul.triton.descriptors import (
    aligned,
    describable,
    describable_from_any_row,
    describe,
    precision,
    transposed,
)


class GroupedProductTraits(NamedTuple):
    """What a grouped product is compiled for."""

    PRECISION: str
    X: TileAccess
    W: TileAccess  # of the weights
    EVEN_K: bool  # K is a multiple of BLOCK_K
    GROUPS: int  # a power of two above the number of groups
    GATE: str  # how the weights hold gate and up; "" without a gate
    ACTIVATION: str
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    NUM_STAGES: int


class WeightGradientTraits(NamedTuple):
    """What the gradient of the weights is compiled for. X and DZ are both loaded by TMA, or both by rows."""

    PRECISION: str
    X: TileAccess
    DZ: TileAccess
    GROUP_M: int
    BLOCK_M: int  # features of x
    BLOCK_N: int  # columns of dz
    BLOCK_K: int  # rows of both
    NUM_STAGES: int


@triton.jit
def _row_index(index, row, inside):
    """Which rows of a tensor the rows of a tile are: index[row], or row where there is no index. In 64 bits."""
    if index is None:
        return row.to(tl.int64)
    else:
        return tl.load(index + row, mask=inside, other=0).to(tl.int64)


@triton.jit
def _load_rows(base, row, inside, row_stride, column, columns, column_stride):
    """[rows, columns] of a matrix, any rows of it; zero where `inside` is false and beyond the columns."""
    pointers = base + row[:, None] * row_stride + column.to(tl.int64)[None, :] * column_stride
    return tl.load(pointers, mask=inside[:, None] & (column < columns)[None, :], other=0.0)


@triton.jit
def _scaled_and_biased(value, tensors, strides, x_row, group, column, in_rows, in_columns):
    """value [rows, columns], a sum, times its scales, plus its bias; of `GroupedTensors` and `GroupedStrides`."""
    if tensors.x_scale is not None:
        left = tl.load(tensors.x_scale + x_row * strides.x_scale, mask=in_rows, other=0.0)
        scales = tensors.weight_scale + group.to(tl.int64) * strides.weight_scale_group
        scales += column * strides.weight_scale_column
        value *= left[:, None] * tl.load(scales, mask=in_columns, other=0.0)[None, :]
    if tensors.bias is not None:
        vector = tensors.bias + group.to(tl.int64) * strides.bias_group + column * strides.bias_column
        value += tl.load(vector, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    return value


@triton.jit
def grouped_matmul_kernel(
    x, x_descriptor, weights, weights_descriptor, y, offsets, tensors, x_strides, weight_strides, strides,
    rows, groups, N, K, columns, TRAITS: tl.constexpr,
):  # fmt: skip
    """A program computes every num_programs-th tile [BLOCK_M, BLOCK_N] of the products of all groups.

    `tensors`, `strides` and TRAITS are GroupedTensors, GroupedStrides and GroupedProductTraits. GATE "halves": a tile
    is BLOCK_N columns of gate and of up, with an accumulator each. "interleaved": BLOCK_N / 2.
    """
    X: tl.constexpr = TRAITS.X
    W: tl.constexpr = TRAITS.W
    PRECISION: tl.constexpr = TRAITS.PRECISION
    MASK_K: tl.constexpr = not TRAITS.EVEN_K
    GROUPS: tl.constexpr = TRAITS.GROUPS
    GATE: tl.constexpr = TRAITS.GATE
    ACTIVATION: tl.constexpr = TRAITS.ACTIVATION
    BLOCK_M: tl.constexpr = TRAITS.BLOCK_M
    BLOCK_N: tl.constexpr = TRAITS.BLOCK_N
    BLOCK_K: tl.constexpr = TRAITS.BLOCK_K
    HALVES: tl.constexpr = GATE == "halves"
    preactivation, bias = tensors.preactivation, tensors.bias
    group_id = tl.arange(0, GROUPS)
    begins = tl.load(offsets + group_id, mask=group_id <= groups, other=0)
    ends = tl.load(offsets + group_id + 1, mask=group_id < groups, other=0)
    ends = tl.where(group_id == groups, rows, ends)
    tiles_of = tl.where(ends > begins, (ends - begins + BLOCK_M - 1) // BLOCK_M, 0)
    tiles_until = tl.cumsum(tiles_of, 0)
    product_columns = columns if HALVES else N  # that have a tile of their own
    tiles_n = tl.cdiv(product_columns, BLOCK_N)

    for work in tl.range(tl.program_id(0), tl.sum(tiles_of, 0) * tiles_n, tl.num_programs(0)):
        tile_m, first_n = work // tiles_n, work % tiles_n * BLOCK_N
        group = tl.sum((tiles_until <= tile_m).to(tl.int32), 0)
        mine = group_id == group
        first_tile = tl.sum(tl.where(mine, tiles_until - tiles_of, 0), 0)
        begin, end = tl.sum(tl.where(mine, begins, 0), 0), tl.sum(tl.where(mine, ends, 0), 0)
        first_m = begin + (tile_m - first_tile) * BLOCK_M
        row, column = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
        in_rows, in_columns = row < end, column < product_columns
        x_row = _row_index(tensors.gather, row, in_rows)
        real = group < groups
        weight_group = tl.where(real, group, 0)
        x_operand = Operand(x, x_descriptor, 0, 0)
        weight = weights + weight_group.to(tl.int64) * weight_strides[0]
        w_operand = Operand(weight, weights_descriptor, weight_strides[1], weight_strides[2])
        value = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = value
        for step in tl.range(0, tl.where(real, tl.cdiv(K, BLOCK_K), 0), num_stages=TRAITS.NUM_STAGES):
            k = step * BLOCK_K
            if X.TMA:  # rows of the next group are read too, and not stored
                x_tile = load_tile(x_operand, 0, first_m, k, rows, K, X, BLOCK_M, BLOCK_K, False, False)
            else:
                x_tile = _load_rows(x, x_row, in_rows, x_strides[0], k + tl.arange(0, BLOCK_K), K, x_strides[1])
            w_tile = load_tile(w_operand, weight_group, k, first_n, K, N, W, BLOCK_K, BLOCK_N, MASK_K, True)
            value = tl.dot(x_tile, w_tile, value, input_precision=PRECISION)
            if HALVES:
                up_tile = load_tile(
                    w_operand, weight_group, k, first_n + columns, K, N, W, BLOCK_K, BLOCK_N, MASK_K, True
                )
                up = tl.dot(x_tile, up_tile, up, input_precision=PRECISION)
        value = _scaled_and_biased(value, tensors, strides, x_row, weight_group, column, in_rows, in_columns)
        inside = in_rows[:, None] & in_columns[None, :]
        z_offset = row.to(tl.int64)[:, None] * N + column[None, :]
        if preactivation is not None:
            z = tl.where(real, value, 0.0).to(preactivation.dtype.element_ty)
            tl.store(preactivation + z_offset, z, mask=inside)
        if HALVES:
            up = _scaled_and_biased(up, tensors, strides, x_row, weight_group, column + columns, in_rows, in_columns)
            if preactivation is not None:
                z = tl.where(real, up, 0.0).to(preactivation.dtype.element_ty)
                tl.store(preactivation + z_offset + columns, z, mask=inside)
        y_column, in_y = column, in_columns
        if GATE == "interleaved":
            value, up = tl.split(tl.reshape(value, [BLOCK_M, BLOCK_N // 2, 2]))
            y_column = first_n // 2 + tl.arange(0, BLOCK_N // 2)
            in_y = y_column < columns
        value = apply_epilogue(
            value, up, row, y_column, y_column, in_rows, in_y, bias, bias, 0, bias, 0, ACTIVATION
        )  # fmt: skip
        if tensors.row_weights is not None:
            value *= tl.load(tensors.row_weights + row, mask=in_rows, other=0.0)[:, None]
        value = tl.where(real, value, 0.0)
        y_row = _row_index(tensors.scatter, row, in_rows)
        tl.store(
            y + y_row[:, None] * columns + y_column[None, :], value.to(y.dtype.element_ty),
            mask=in_rows[:, None] & in_y[None, :],
        )  # fmt: skip


@triton.jit
def grouped_weight_gradient_kernel(
    x, x_descriptor, dz, dz_descriptor, dw, offsets, gather, x_strides, dz_strides, rows, groups, N, K,
    TRAITS: tl.constexpr,
):  # fmt: skip
    """dW[g] [K, N]: a tile is BLOCK_M features of x by BLOCK_N of dz; the sum goes over BLOCK_K rows at a time.

    TRAITS is a `WeightGradientTraits`.
    """
    X: tl.constexpr = TRAITS.X
    DZ: tl.constexpr = TRAITS.DZ
    PRECISION: tl.constexpr = TRAITS.PRECISION
    BLOCK_M: tl.constexpr = TRAITS.BLOCK_M
    BLOCK_N: tl.constexpr = TRAITS.BLOCK_N
    BLOCK_K: tl.constexpr = TRAITS.BLOCK_K
    NUM_STAGES: tl.constexpr = TRAITS.NUM_STAGES
    tiles_k, tiles_n = tl.cdiv(K, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tiles = tiles_k * tiles_n
    for work in tl.range(tl.program_id(0), tiles * groups, tl.num_programs(0)):
        group = work // tiles
        tile_k, tile_n = tile_position(work % tiles, tiles_k, tiles_n, TRAITS.GROUP_M)
        first_k, first_n = tile_k * BLOCK_M, tile_n * BLOCK_N
        k, column = first_k + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
        begin, end = tl.load(offsets + group), tl.load(offsets + group + 1)
        full = begin + (end - begin) // BLOCK_K * BLOCK_K  # rows in whole steps; the last step has bounds
        value = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if X.TMA:
            x_operand, dz_operand = Operand(x, x_descriptor, 0, 0), Operand(dz, dz_descriptor, 0, 0)
            for first in tl.range(begin, full, BLOCK_K, num_stages=NUM_STAGES):
                x_tile = load_tile(x_operand, 0, first, first_k, rows, K, X, BLOCK_K, BLOCK_M, False, False)
                dz_tile = load_tile(dz_operand, 0, first, first_n, rows, N, DZ, BLOCK_K, BLOCK_N, False, False)
                value = tl.dot(x_tile.T, dz_tile, value, input_precision=PRECISION)
            rest = full
        else:
            rest = begin
        for first in tl.range(rest, end, BLOCK_K, num_stages=1 if X.TMA else NUM_STAGES):
            row = first + tl.arange(0, BLOCK_K)
            inside = row < end
            x_tile = _load_rows(x, _row_index(gather, row, inside), inside, x_strides[0], k, K, x_strides[1])
            dz_tile = _load_rows(dz, row.to(tl.int64), inside, dz_strides[0], column, N, dz_strides[1])
            value = tl.dot(x_tile.T, dz_tile, value, input_precision=PRECISION)
        target = dw + (group.to(tl.int64) * K + k.to(tl.int64))[:, None] * N + column[None, :]
        tl.store(target, value.to(dw.dtype.element_ty), mask=(k < K)[:, None] & (column < N)[None, :])


def grouped_forward(
    x: Tensor, weights: Tensor, offsets: Tensor, params: GroupedParams, tensors: GroupedTensors
) -> Tensor:
    """y [out_rows, columns]; `GroupedMatmulKernels.grouped_forward` documents the arguments."""
    y, needed = params.new_output(x, weights, tensors)
    if not needed:
        return y
    (groups, k, n), rows, columns = weights.shape, tensors.num_rows(x), y.shape[1]
    props = device.properties(x.device)
    shape = {"rows": rows, "groups": groups, "n": n, "k": k, "bytes": x.element_size(), "weight_gradient": False,
             "blocks": False, "aligned": aligned(x) and aligned(weights)}  # fmt: skip
    config = tune.pick(GROUPED, props, shape)
    # Offsets of tiles are multiples of 16 bytes, those of up as well.
    up_aligned = params.gate != "halves" or columns * x.element_size() % 16 == 0
    x_tma, w_tma = tensors.gather is None and describable_from_any_row(x), describable(weights) and up_aligned
    # Gate and up share the registers of one accumulator.
    block_n = max(16, config.block_n // 2) if params.gate == "halves" else config.block_n
    tiles_n = tune.ceil_div(columns if params.gate == "halves" else n, block_n)
    max_tiles = (tune.ceil_div(rows, config.block_m) + groups) * tiles_n
    launch(
        grouped_matmul_kernel, (min(max_tiles, props.sms) if config.persistent else max_tiles,),
        x, describe(x, config.block_m, config.block_k) if x_tma else x,
        weights, describe(weights, config.block_k, block_n) if w_tma else weights,
        y, offsets, tensors, x.stride(), weights.stride(), tensors.strides, rows, groups, n, k, columns,
        TRAITS=GroupedProductTraits(
            precision(x, params.tf32), TileAccess(x_tma, False, x_tma and transposed(x)),
            TileAccess(w_tma, True, w_tma and transposed(weights)), k % config.block_k == 0,
            tune.power_of_2(groups + 1), params.gate, params.activation,
            config.block_m, block_n, config.block_k, config.num_stages,
        ),
        num_warps=config.num_warps,
    )  # fmt: skip
    return y


def grouped_weight_gradient(
    x: Tensor, dz: Tensor, offsets: Tensor, params: GroupedParams, gather: Tensor | None
) -> Tensor:
    """dW [groups, K, N]; `GroupedMatmulKernels.grouped_weight_gradient` documents the arguments."""
    groups, k, n = offsets.shape[0] - 1, x.shape[1], dz.shape[1]
    dw = torch.empty((groups, k, n), dtype=params.out_dtype, device=x.device)
    if dw.numel() == 0:
        return dw
    props = device.properties(x.device)
    shape = {"rows": dz.shape[0], "groups": groups, "n": n, "k": k, "bytes": x.element_size(), "weight_gradient": True,
             "blocks": False, "aligned": aligned(x) and aligned(dz)}  # fmt: skip
    config = tune.pick(GROUPED, props, shape)
    tma = gather is None and describable_from_any_row(x) and describable_from_any_row(dz)
    tiles = tune.ceil_div(k, config.block_m) * tune.ceil_div(n, config.block_n) * groups
    launch(
        grouped_weight_gradient_kernel, (min(tiles, props.sms) if config.persistent else tiles,),
        x, describe(x, config.block_k, config.block_m) if tma else x,
        dz, describe(dz, config.block_k, config.block_n) if tma else dz,
        dw, offsets, gather, x.stride(), dz.stride(), dz.shape[0], groups, n, k,
        TRAITS=WeightGradientTraits(
            precision(x, params.tf32), TileAccess(tma, False, tma and transposed(x)),
            TileAccess(tma, False, tma and transposed(dz)), config.group_m,
            config.block_m, config.block_n, config.block_k, config.num_stages,
        ),
        num_warps=config.num_warps,
    )  # fmt: skip
    return dw
