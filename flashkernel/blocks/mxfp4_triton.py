"""MXFP4 weights in fp8, for products with fp8 activations: one pass over the weight.

An e2m1 value has two significant bits and an e4m3 number four, and both scales are powers of two. So a row in e4m3
with one scale, 64 times the largest of its groups' scales, is exact, but for groups whose scale is less than 2^-14 of
that: their values are rounded to multiples of 2^-9 of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flashkernel.blocks.codec_triton import encode_e4m3
from flashkernel.blocks.dequantize_triton import e2m1_values
from flashkernel.blocks.fp8 import FP8
from flashkernel.blocks.weight import GRANULARITIES, Weight
from flashkernel.blocks.weight_formats.grouped import scales_of
from flashkernel.core import tune
from flashkernel.core.launch import launch

_ROOM = tl.constexpr(6)  # 6, the largest value, times 2^6 is 384, of 448
_LEAST = tl.constexpr(7)  # the least exponent of which 2^-6 times its power is a normal float32


@triton.jit
def mxfp4_to_fp8(
    codes, scales, out, row_scales, rows, groups, ROWS: tl.constexpr, GROUPS: tl.constexpr, SCALES: tl.constexpr
):
    """ROWS rows of a matrix [rows, 32 * groups], GROUPS groups at a time; SCALES is a power of two from `groups` on."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    in_rows = row < rows
    every = tl.arange(0, SCALES)
    given = tl.load(
        scales + row[:, None] * groups + every[None, :], mask=in_rows[:, None] & (every < groups)[None, :], other=0
    ).to(tl.int32)  # [ROWS, SCALES]
    largest = tl.maximum(tl.max(given, 1), _LEAST)  # [ROWS]
    bits = tl.where(largest == 255, 0x7FC00000, (largest - _ROOM) << 23)  # 255 stands for NaN
    tl.store(row_scales + row, bits.to(tl.float32, bitcast=True), mask=in_rows)
    byte = tl.arange(0, GROUPS * 16)
    column = tl.arange(0, GROUPS * 32)
    for first in range(0, groups, GROUPS):
        group = first + tl.arange(0, GROUPS)
        inside = in_rows[:, None] & (group < groups)[None, :]
        scale = tl.load(scales + row[:, None] * groups + group[None, :], mask=inside, other=0).to(tl.int32)
        exponent = tl.maximum(scale - largest[:, None] + (_ROOM + 127), 0)
        factor = (exponent << 23).to(tl.float32, bitcast=True)  # [ROWS, GROUPS]
        wide = tl.reshape(tl.broadcast_to(factor[:, :, None], (ROWS, GROUPS, 32)), (ROWS, GROUPS * 32))
        there = in_rows[:, None] & (first * 16 + byte < groups * 16)[None, :]
        pairs = tl.load(codes + row[:, None] * (groups * 16) + (first * 16 + byte)[None, :], mask=there, other=0)
        values = e2m1_values(tl.interleave(pairs & 15, pairs >> 4)) * wide
        written = in_rows[:, None] & (first * 32 + column < groups * 32)[None, :]
        tl.store(out + row[:, None] * (groups * 32) + (first * 32 + column)[None, :], encode_e4m3(values), mask=written)


def in_fp8(weight: Weight) -> Weight:
    """Returns an MXFP4 matrix (out, in), or a stack of them, as "fp8" with a scale for each row, for x in fp8."""
    data, scales = weight.data.contiguous(), scales_of(weight).contiguous()
    out = torch.empty(tuple(weight.shape), dtype=torch.uint8, device=weight.device)
    row_scales = torch.empty((*out.shape[:-1], 1), dtype=torch.float32, device=weight.device)
    rows, groups = row_scales.numel(), scales.shape[-1]
    if out.numel():
        launch(
            mxfp4_to_fp8, (tune.ceil_div(rows, 4),), data, scales, out, row_scales, rows, groups,
            ROWS=4, GROUPS=16, SCALES=tune.power_of_2(groups), num_warps=4,
        )  # fmt: skip
    else:
        row_scales.fill_(1.0)
    return Weight(out.view(FP8), row_scales, None, "fp8", GRANULARITIES["row"], FP8)
