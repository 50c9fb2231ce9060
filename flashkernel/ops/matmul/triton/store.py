"""Device functions that end a product: they apply the epilogue to a tile in registers and store it."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashkernel.blocks.codec_triton import encode_e4m3
from flashkernel.blocks.epilogue_triton import apply_epilogue, block_scale, pull_back_activation, saturate_fp8


@triton.jit
def load_preactivation(z, stride, row, first, in_rows, N, PACKED: tl.constexpr, BLOCK_N: tl.constexpr):
    """(z, up) of the columns from `first` on, [rows, BLOCK_N] in float32; up is z where PACKED is ""."""
    column = first + tl.arange(0, BLOCK_N)
    start = row.to(tl.int64)[:, None] * stride
    if PACKED == "interleaved":
        both = 2 * first + tl.arange(0, 2 * BLOCK_N)
        inside = in_rows[:, None] & (both < 2 * N)[None, :]
        pairs = tl.load(z + start + both[None, :], mask=inside, other=0.0).to(tl.float32)
        value, up = tl.split(tl.reshape(pairs, [pairs.shape[0], BLOCK_N, 2]))
    else:
        inside = in_rows[:, None] & (column < N)[None, :]
        value = tl.load(z + start + column[None, :], mask=inside, other=0.0).to(tl.float32)
        up = value
        if PACKED == "halves":
            up = tl.load(z + start + (N + column)[None, :], mask=inside, other=0.0).to(tl.float32)
    return value, up


@triton.jit
def store_preactivation(z, stride, value, up, row, first, in_rows, N, PACKED: tl.constexpr, BLOCK_N: tl.constexpr):
    """Stores (value, up) of the columns from `first` on; the counterpart of `load_preactivation`."""
    column = first + tl.arange(0, BLOCK_N)
    start = row.to(tl.int64)[:, None] * stride
    value, up = value.to(z.dtype.element_ty), up.to(z.dtype.element_ty)
    if PACKED == "interleaved":
        both = 2 * first + tl.arange(0, 2 * BLOCK_N)
        inside = in_rows[:, None] & (both < 2 * N)[None, :]
        tl.store(z + start + both[None, :], tl.interleave(value, up), mask=inside)
    else:
        inside = in_rows[:, None] & (column < N)[None, :]
        tl.store(z + start + column[None, :], value, mask=inside)
        if PACKED == "halves":
            tl.store(z + start + (N + column)[None, :], up, mask=inside)


class Output(NamedTuple):
    """What `store_result` writes C by, and what it reads for that; inside a kernel."""

    c: Any  # [batches, M, N]
    c_descriptor: Any
    pointers: Any  # EpiloguePointers
    strides: Any  # EpilogueStrides
    M: Any
    N: Any


class Tile(NamedTuple):
    """Where a tile of C begins."""

    batch: Any
    first_m: Any
    first_n: Any


@triton.jit
def store_result(
    value, up, tile, output, EPILOGUE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Applies the epilogue to value [BLOCK_M, BLOCK_N] in float32 and stores it at a `Tile` of an `Output`.

    EPILOGUE is an `EpilogueTraits`. What its BEFORE gives is stored to z, if there is one. With dz the product is the
    gradient of the activation in AFTER: z is read, the activation stored to C and its gradient to dz. C in fp8 is
    divided by out_scale[row], or by scales of 1 x 128 elements that are stored to block_scales; then PART_N is 128.
    """
    if BLOCK_N > EPILOGUE.PART_N:
        HALF: tl.constexpr = BLOCK_N // 2
        left, right = _column_halves(value, BLOCK_M, HALF)
        up_left, up_right = _column_halves(up, BLOCK_M, HALF)
        store_result(left, up_left, tile, output, EPILOGUE, BLOCK_M, HALF)
        right_tile = Tile(tile.batch, tile.first_m, tile.first_n + HALF)
        store_result(right, up_right, right_tile, output, EPILOGUE, BLOCK_M, HALF)
    else:
        BEFORE: tl.constexpr = EPILOGUE.BEFORE
        AFTER: tl.constexpr = EPILOGUE.AFTER
        PACKED: tl.constexpr = EPILOGUE.PACKED
        c, pointers, strides, M, N = output.c, output.pointers, output.strides, output.M, output.N
        z, dz, bias, up_bias, residual = pointers.z, pointers.dz, pointers.bias, pointers.up_bias, pointers.residual
        batch, first_m, first_n = tile.batch, tile.first_m, tile.first_n
        row, column = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
        in_rows, in_columns = row < M, column < N
        matrix = batch.to(tl.int64)
        residual_matrix = residual
        if residual is not None:
            residual_matrix = residual + matrix * strides.residual_batch
        z_matrix = z
        if z is not None:
            z_matrix = z + matrix * strides.z_batch
        if dz is not None:
            z_value, z_up = load_preactivation(z_matrix, strides.z_row, row, first_n, in_rows, N, PACKED, BLOCK_N)
            value, gradient, up_gradient = pull_back_activation(value, z_value, z_up, AFTER)
            dz_matrix = dz + matrix * strides.dz_batch
            store_preactivation(
                dz_matrix, strides.dz_row, gradient, up_gradient, row, first_n, in_rows, N, PACKED, BLOCK_N
            )
        else:
            value, up = add_bias(value, up, column, in_columns, bias, up_bias, strides.bias, BEFORE, PACKED)
            if z is not None:
                store_preactivation(z_matrix, strides.z_row, value, up, row, first_n, in_rows, N, PACKED, BLOCK_N)
            value = apply_epilogue(
                value, up, row, column, column, in_rows, in_columns,
                bias, up_bias, strides.bias, residual_matrix, strides.residual_row, AFTER,
                pointers.seed, pointers.device_seed, matrix * M, N,
            )  # fmt: skip
        if pointers.out_scale is not None:
            scales = pointers.out_scale + matrix * strides.out_scale_batch + row.to(tl.int64) * strides.out_scale_row
            value /= tl.load(scales, mask=in_rows, other=1.0)[:, None]
        if pointers.block_scales is not None:
            tl.static_assert(BLOCK_N == 128, "a scale belongs to 128 columns")
            scale = block_scale(value, in_columns)
            scale_offset = (
                matrix * strides.block_scales_batch + row.to(tl.int64) * strides.block_scales_row + first_n // 128
            )
            tl.store(pointers.block_scales + scale_offset, scale, mask=in_rows & (first_n < N))
            value /= scale[:, None]
        result = as_stored(value, c)
        if EPILOGUE.C_TMA:
            output.c_descriptor.store([batch, first_m, first_n], result.reshape([1, BLOCK_M, BLOCK_N]))
        else:
            offset = row.to(tl.int64)[:, None] * strides.c_row + column[None, :]
            inside = in_rows[:, None] & in_columns[None, :]
            tl.store(c + matrix * strides.c_batch + offset, result, mask=inside)


@triton.jit
def as_stored(value, c):
    """float32 values in the dtype of C: fp8 saturates, and uint8 stands for its codes (`fp8_bytes`)."""
    if c.dtype.element_ty == tl.uint8:
        return encode_e4m3(value)
    elif c.dtype.element_ty == tl.float8e4nv:
        return saturate_fp8(value).to(tl.float8e4nv)
    else:
        return value.to(c.dtype.element_ty)


@triton.jit
def _column_halves(x, ROWS: tl.constexpr, HALF: tl.constexpr):
    """The left and the right half of x's columns."""
    return tl.split(tl.permute(tl.reshape(x, [ROWS, 2, HALF]), [0, 2, 1]))


@triton.jit
def add_bias(value, up, column, in_columns, bias, up_bias, bias_stride, BEFORE: tl.constexpr, PACKED: tl.constexpr):
    """(value, up) with their biases where BEFORE, the chain ahead of the activation, has one."""
    if BEFORE != "":
        tl.static_assert(BEFORE == "bias", "ahead of the activation there is a bias, or nothing")
        value += tl.load(bias + column * bias_stride, mask=in_columns, other=0.0).to(tl.float32)[None, :]
        if PACKED != "":
            up += tl.load(up_bias + column * bias_stride, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    return value, up
