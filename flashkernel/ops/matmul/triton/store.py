"""Device functions that end a product: they apply the epilogue to a tile in registers and store it."""

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


@triton.jit
def store_result(
    value, up, batch, first_m, first_n, M, N,
    c, c_descriptor, z, dz, bias, up_bias, residual, seed, device_seed, out_scale, block_scales,
    c_strides, z_strides, dz_strides, bias_stride, residual_strides, out_scale_strides, block_scales_strides,
    BEFORE: tl.constexpr, AFTER: tl.constexpr, PACKED: tl.constexpr, C_TMA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PART_N: tl.constexpr,
):  # fmt: skip
    """Applies the epilogue to value [BLOCK_M, BLOCK_N] in float32 and stores it at (batch, first_m, first_n) of C.

    BEFORE is the part of the chain ahead of the activation; AFTER is the activation and what follows it. What BEFORE
    gives is stored to z, if there is one. PACKED says how z holds gate and up; without a gate it is "". With dz the
    product is the gradient of the activation in AFTER: z is read, the activation stored to C and its gradient to dz.
    Strides are those of the batch and of the rows. Dropout follows from `seed`, a `seed_word`, or from the number at
    `device_seed`. C in fp8 is divided by out_scale[row], or by scales of 1 x 128 elements that are stored to
    block_scales; then PART_N is 128. PART_N columns are worked on at a time, to save registers.
    """
    if BLOCK_N > PART_N:
        HALF: tl.constexpr = BLOCK_N // 2
        left, right = _column_halves(value, BLOCK_M, HALF)
        up_left, up_right = _column_halves(up, BLOCK_M, HALF)
        store_result(
            left, up_left, batch, first_m, first_n, M, N, c, c_descriptor, z, dz, bias, up_bias, residual,
            seed, device_seed, out_scale, block_scales, c_strides, z_strides, dz_strides, bias_stride,
            residual_strides, out_scale_strides, block_scales_strides,
            BEFORE, AFTER, PACKED, C_TMA, BLOCK_M, HALF, PART_N,
        )  # fmt: skip
        store_result(
            right, up_right, batch, first_m, first_n + HALF, M, N, c, c_descriptor, z, dz, bias, up_bias, residual,
            seed, device_seed, out_scale, block_scales, c_strides, z_strides, dz_strides, bias_stride,
            residual_strides, out_scale_strides, block_scales_strides,
            BEFORE, AFTER, PACKED, C_TMA, BLOCK_M, HALF, PART_N,
        )  # fmt: skip
    else:
        row, column = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
        in_rows, in_columns = row < M, column < N
        matrix = batch.to(tl.int64)
        residual_matrix = residual
        if residual is not None:
            residual_matrix = residual + matrix * residual_strides[0]
        z_matrix = z
        if z is not None:
            z_matrix = z + matrix * z_strides[0]
        if dz is not None:
            z_value, z_up = load_preactivation(z_matrix, z_strides[1], row, first_n, in_rows, N, PACKED, BLOCK_N)
            value, gradient, up_gradient = pull_back_activation(value, z_value, z_up, AFTER)
            dz_matrix = dz + matrix * dz_strides[0]
            store_preactivation(
                dz_matrix, dz_strides[1], gradient, up_gradient, row, first_n, in_rows, N, PACKED, BLOCK_N
            )
        else:
            value, up = add_bias(value, up, column, in_columns, bias, up_bias, bias_stride, BEFORE, PACKED)
            if z is not None:
                store_preactivation(z_matrix, z_strides[1], value, up, row, first_n, in_rows, N, PACKED, BLOCK_N)
            value = apply_epilogue(
                value, up, row, column, column, in_rows, in_columns,
                bias, up_bias, bias_stride, residual_matrix, residual_strides[1], AFTER,
                seed, device_seed, matrix * M, N,
            )  # fmt: skip
        if out_scale is not None:
            scales = out_scale + matrix * out_scale_strides[0] + row.to(tl.int64) * out_scale_strides[1]
            value /= tl.load(scales, mask=in_rows, other=1.0)[:, None]
        if block_scales is not None:
            tl.static_assert(BLOCK_N == 128, "a scale belongs to 128 columns")
            scale = block_scale(value, in_columns)
            scale_offset = (
                matrix * block_scales_strides[0] + row.to(tl.int64) * block_scales_strides[1] + first_n // 128
            )
            tl.store(block_scales + scale_offset, scale, mask=in_rows & (first_n < N))
            value /= scale[:, None]
        result = as_stored(value, c)
        if C_TMA:
            c_descriptor.store([batch, first_m, first_n], result.reshape([1, BLOCK_M, BLOCK_N]))
        else:
            offset = row.to(tl.int64)[:, None] * c_strides[1] + column[None, :]
            inside = in_rows[:, None] & in_columns[None, :]
            tl.store(c + matrix * c_strides[0] + offset, result, mask=inside)


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
