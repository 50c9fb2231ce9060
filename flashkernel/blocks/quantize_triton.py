"""Activations in float8_e4m3fn with a scale for each row, or for each row and 128 columns, in one launch.

It computes what `fp8.quantize_fp8_groups` defines, which takes ten of torch's operators.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashkernel.blocks.codec_triton import encode_e4m3, largest_bits
from flashkernel.blocks.fp8 import FP8, FP8_MAX, SCALE_BLOCK, group_count
from flashkernel.core import tune
from flashkernel.core.launch import launch

_LARGEST = tl.constexpr(FP8_MAX)
_SMALLEST = tl.constexpr(torch.finfo(torch.float32).tiny)  # a quotient that rounds to 0 would divide by it
_MOST_COLUMNS = 4096  # of a row at a time


@triton.jit
def _scale_of(bits):
    """The scale of a group from the bits of its largest magnitude."""
    largest = bits.to(tl.float32, bitcast=True)
    return tl.where(largest > 0, tl.maximum(tl.div_rn(largest, _LARGEST), _SMALLEST), 1.0)


@triton.jit
def quantize_rows(x, data, scales, columns, x_stride, BLOCK: tl.constexpr):
    """A program quantizes one row with one scale; the second time it reads the row, that comes from the cache."""
    row = tl.program_id(0).to(tl.int64)
    step = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.int32)
    for first in range(0, columns, BLOCK):
        values = tl.load(x + row * x_stride + first + step, mask=first + step < columns, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, values.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    scale = _scale_of(tl.max(largest, 0))
    tl.store(scales + row, scale)
    for first in range(0, columns, BLOCK):
        inside = first + step < columns
        values = tl.load(x + row * x_stride + first + step, mask=inside, other=0.0).to(tl.float32)
        tl.store(data + row * columns + first + step, encode_e4m3(tl.div_rn(values, scale)), mask=inside)


@triton.jit
def quantize_groups(x, data, scales, columns, groups, x_stride, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """A program quantizes GROUPS groups of GROUP columns of one row, each with a scale of its own."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]  # [GROUPS, GROUP]
    inside = column < columns
    values = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = _scale_of(largest_bits(values))
    tl.store(scales + row * groups + group, scale, mask=group < groups)
    quotient = tl.div_rn(values, tl.broadcast_to(scale[:, None], [GROUPS, GROUP]))
    tl.store(data + row * columns + column, encode_e4m3(quotient), mask=inside)


def quantize_activations(x: Tensor, columns_of_group: int) -> tuple[Tensor, Tensor]:
    """Returns x [rows, columns] in float8_e4m3fn and its scales [rows, groups].

    Args:
        x: Any float dtype, with unit stride along its rows.
        columns_of_group: Columns of a row that share a scale: 128, or -1 for all.
    """
    rows, columns = x.shape
    groups = group_count(columns, columns_of_group)
    data = torch.empty((rows, columns), dtype=FP8, device=x.device)
    scales = torch.empty((rows, groups), dtype=torch.float32, device=x.device)
    if x.numel() == 0:
        scales.fill_(1.0)
        return data, scales
    encoded = data.view(torch.uint8)
    if columns_of_group == -1:
        block = min(_MOST_COLUMNS, max(128, tune.power_of_2(columns)))
        warps = max(1, block // 512)
        launch(quantize_rows, (rows,), x, encoded, scales, columns, x.stride(0), BLOCK=block, num_warps=warps)
    else:
        each = min(16, tune.power_of_2(groups))
        launch(
            quantize_groups, (rows, tune.ceil_div(groups, each)), x, encoded, scales, columns, groups, x.stride(0),
            GROUP=SCALE_BLOCK, GROUPS=each, num_warps=4,
        )  # fmt: skip
    return data, scales
