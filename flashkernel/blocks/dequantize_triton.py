"""Quantized weights in Triton: tiles of them as floats, and whole matrices at memory speed.

The layouts are those of `blocks/weight_formats`: row-major "int4", "int8" and "mxfp4", and their tiles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashkernel.blocks.weight import Weight
from flashkernel.blocks.weight_formats.tiles import SUFFIX, TILE
from flashkernel.core.launch import launch
from flashkernel.core.tune import ceil_div


@triton.jit
def e2m1_values(codes):
    """Float32 values of e2m1 codes: 0, 0.5, 1, 1.5, 2, 3, 4 and 6, and the same with a sign."""
    fraction, exponent = (codes & 1).to(tl.int32), ((codes >> 1) & 3).to(tl.int32)
    quarters = tl.where(exponent == 0, 2 * fraction, (2 + fraction) << exponent)
    return quarters.to(tl.float32) * tl.where(codes >= 8, -0.25, 0.25)


@triton.jit
def e8m0_values(exponents):
    """2^(exponent - 127) in float32; 255 stands for NaN."""
    wide = exponents.to(tl.int32)
    bits = tl.where(wide == 0, 1 << 22, wide << 23)
    return tl.where(wide == 255, float("nan"), bits.to(tl.float32, bitcast=True))


@triton.jit
def group_values(source, row_offsets, first, step, inner, GROUP: tl.constexpr, BLOCK_K: tl.constexpr):
    """Scales or zeros of the columns from `first` on: [ROWS, 1] where all share one, else [ROWS, BLOCK_K].

    Args:
        source: Pointer to the values.
        row_offsets: Of the rows in them, [ROWS].
        first: The first of the columns first + step.
        step: 0 to BLOCK_K - 1.
        inner: Columns of the matrix.
        GROUP: Columns that share a value; 0: all.
        BLOCK_K: Columns at a time.
    """
    if GROUP == 0:
        return tl.load(source + row_offsets)[:, None]
    elif GROUP % BLOCK_K == 0:
        return tl.load(source + row_offsets + first // GROUP)[:, None]
    elif BLOCK_K % GROUP == 0:
        GROUPS: tl.constexpr = BLOCK_K // GROUP
        group = tl.minimum(first // GROUP + tl.arange(0, GROUPS), tl.cdiv(inner, GROUP) - 1)
        values = tl.load(source + row_offsets[:, None] + group[None, :])  # [ROWS, GROUPS]
        wide = tl.broadcast_to(values[:, :, None], (values.shape[0], GROUPS, GROUP))
        return tl.reshape(wide, (values.shape[0], BLOCK_K))
    else:
        return tl.load(source + row_offsets[:, None] + (tl.minimum(first + step, inner - 1) // GROUP)[None, :])


@triton.jit
def scaled_codes(codes, scales, zeros, FORMAT: tl.constexpr, ZEROS: tl.constexpr):
    """(code - zero) * scale in float32; `scales` and `zeros` broadcast to the codes."""
    if FORMAT == "mxfp4":
        return e2m1_values(codes) * e8m0_values(scales)
    else:
        values = codes.to(tl.float32)
        if ZEROS:
            values -= zeros.to(tl.float32)
        elif FORMAT == "int4":
            values -= 8.0
        return values * scales.to(tl.float32)


@triton.jit
def load_quantized(
    data, row_offsets, scales, zeros, scale_offsets, first, step, inner,
    FORMAT: tl.constexpr, ZEROS: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Float32 elements [ROWS, BLOCK_K] of a row-major matrix, columns first + step; those beyond `inner` are 0.

    Args:
        data: Pointer to the stored bytes.
        row_offsets: Of the rows in them, [ROWS].
        scales: Pointer to the scales.
        zeros: Pointer to the zero points, of which there are as many.
        scale_offsets: Of the rows in scales and zeros, [ROWS].
        first: The first column, a multiple of BLOCK_K.
        step: 0 to BLOCK_K - 1.
        inner: Columns of the matrix.
        FORMAT: "int4", "int8" or "mxfp4".
        ZEROS: Whether there are zero points.
        GROUP: Columns that share a scale; 0: all.
        BLOCK_K: Columns at a time.
    """
    if FORMAT == "int8":
        inside = first + step < inner
        codes = tl.load(data + row_offsets[:, None] + (first + step)[None, :], mask=inside[None, :], other=0)
    else:
        byte = first // 2 + tl.arange(0, BLOCK_K // 2)
        pairs = tl.load(data + row_offsets[:, None] + byte[None, :], mask=(byte < inner // 2)[None, :], other=0)
        codes = tl.interleave(pairs & 15, pairs >> 4)
    scale = group_values(scales, scale_offsets, first, step, inner, GROUP, BLOCK_K)
    zero = scale
    if ZEROS:
        zero = group_values(zeros, scale_offsets, first, step, inner, GROUP, BLOCK_K)
    values = scaled_codes(codes, scale, zero, FORMAT, ZEROS)
    return tl.where((first + step < inner)[None, :], values, 0.0)


@triton.jit
def dequantize_rows(
    data, scales, zeros, out, rows, inner, row_bytes, scale_stride,
    FORMAT: tl.constexpr, ZEROS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A row-major matrix [rows, inner]; scale_stride is 0 where all rows share the scales."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    near = tl.minimum(row, rows - 1).to(tl.int64)
    first, step = tl.program_id(1) * BLOCK_K, tl.arange(0, BLOCK_K)
    values = load_quantized(
        data, near * row_bytes, scales, zeros, near * scale_stride, first, step, inner, FORMAT, ZEROS, GROUP, BLOCK_K
    )
    target = out + row.to(tl.int64)[:, None] * inner + (first + step)[None, :]
    tl.store(target, values, mask=(row < rows)[:, None] & (first + step < inner)[None, :])


@triton.jit
def _tile_codes(words, FORMAT: tl.constexpr):
    """Codes [64, 64] of a tile from its 32-bit words, in memory order.

    A word of 4-bit codes is [warp, g, t, j] and holds [e, c, h] from its highest bit down to its lowest; one of 8 bits
    is [j // 2, warp, g, t, j % 2, c] and holds [e, h]. They are row (warp, h, g) and column (j, c, t, e).
    """
    if FORMAT == "int8":
        halves = tl.join(words & 0xFFFF, (words >> 16) & 0xFFFF)
        codes = tl.join(halves & 255, (halves >> 8) & 255)  # [..., e, h]
        codes = tl.reshape(codes, (2, 4, 8, 4, 2, 2, 2, 2))
        codes = tl.reshape(tl.permute(codes, (1, 7, 2, 0, 4, 5, 3, 6)), (64, 64))
        return codes.to(tl.int8)
    else:
        halves = tl.join(words & 0xFFFF, (words >> 16) & 0xFFFF)  # e
        bytes_ = tl.join(halves & 255, halves >> 8)  # c
        codes = tl.join(bytes_ & 15, bytes_ >> 4)  # h
        codes = tl.reshape(codes, (4, 8, 4, 4, 2, 2, 2))
        return tl.reshape(tl.permute(codes, (0, 6, 1, 3, 5, 2, 4)), (64, 64)).to(tl.uint8)


@triton.jit
def dequantize_tiles(
    data, scales, zeros, out, inner, groups,
    FORMAT: tl.constexpr, ZEROS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A tile of 64 rows and 64 columns of a matrix in tiles. Its bytes are read in order, 16 by a thread."""
    block, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    WORDS: tl.constexpr = 1024 if FORMAT == "int8" else 512
    words = tl.load(data + (block * (inner // 64) + tile) * WORDS + tl.arange(0, WORDS))
    codes = _tile_codes(words, FORMAT)
    row, column = tl.arange(0, 64), tile * 64 + tl.arange(0, 64)  # within the 64 rows; of the matrix
    lane_row = row // 16 * 16 + row % 8 * 2 + row // 8 % 2
    if GROUP == 32:
        group = (tile * 2 + tl.arange(0, 64) // 32)[None, :]
    else:
        group = (tile * 64 // GROUP if GROUP > 0 else 0) + tl.zeros([1, 1], tl.int32)
    where = (block * groups + group) * 64 + lane_row[:, None]
    scale = tl.load(scales + where)
    zero = tl.load(zeros + where) if ZEROS else scale
    values = scaled_codes(codes, scale, zero, FORMAT, ZEROS)
    tl.store(out + (block * 64 + row[:, None]) * inner + column[None, :], values)


def dequantize(weight: Weight, dtype: torch.dtype) -> Tensor:
    """Returns the matrix (out, in) of a quantized weight in `dtype`, computed in float32 and rounded once.

    The weight is in "int4", "int8" or "mxfp4", or tiles of these, with scales for rows, groups of a row or the tensor;
    or it is a stack (experts, out, in) of such matrices, with scales for rows or groups of a row.
    """
    out = torch.empty(tuple(weight.shape), dtype=dtype, device=weight.device)
    if out.numel() == 0:
        return out
    inner = weight.shape[-1]
    data, scales, *others = [one.contiguous().view(-1, one.shape[-1]) for one in weight.tensors]
    rows = data.shape[0]  # of all experts
    constants = {
        "FORMAT": weight.format.removesuffix(SUFFIX), "ZEROS": bool(others), "GROUP": max(0, weight.group_shape[1]),
        "num_warps": 4,
    }  # fmt: skip
    tensors = (data, scales, others[0] if others else scales, out)
    if weight.format.endswith(SUFFIX):
        grid = rows // TILE, inner // TILE
        launch(dequantize_tiles, grid, data.view(torch.int32), *tensors[1:], inner, scales.shape[1], **constants)
        return out
    block_n, block_k = 16, 256
    launch(
        dequantize_rows, (ceil_div(rows, block_n), ceil_div(inner, block_k)), *tensors, rows, inner, data.shape[1],
        0 if weight.group_shape[0] == -1 else scales.shape[1],
        BLOCK_N=block_n, BLOCK_K=block_k, **constants,
    )  # fmt: skip
    return out
