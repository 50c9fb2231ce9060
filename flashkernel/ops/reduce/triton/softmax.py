"""Softmax of rows that fit a tile: one read, one write. Longer rows are reduced first and spread back after.

A program takes one tile, or walks over many: then the tiles to come are copied into shared memory while this one is
reduced.
"""

import torch
import triton
import triton.language as tl

from flashkernel.core import device, tune
from flashkernel.core.launch import launch
from flashkernel.ops.reduce import kinds
from flashkernel.ops.reduce.configs import (
    SOFTMAX_BACKWARD,
    SOFTMAX_FORWARD,
    programs_of,
    tile_width,
)
from flashkernel.ops.reduce.masks import MaskRows
from flashkernel.ops.reduce.triton.reduction import (
    LOG2E,
    SOFTMAX,
    finite,
    inverse,
    loadable,
    mask_offsets,
    reduce_pairs,
    shape_of,
    spread,
    visible_columns,
)


@triton.jit
def softmax_forward(
    x, mask, y,
    x_stride, rows, width, scale, queries,
    mask_middle, mask_inner, outer_stride, middle_stride, inner_stride, column_stride,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, RISING: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """RISING says that scale > 0: then -inf, which stands for columns beyond the row, survives the scaling."""
    column = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    for begin in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = (begin + tl.arange(0, ROWS)).to(tl.int64)  # [ROWS]
        here = (row < rows)[:, None]  # [ROWS, 1]
        seen = visible_columns(row, width, queries, CAUSAL)[:, None]  # [ROWS, 1]
        there = here & loadable(seen, column, width, CAUSAL)  # [ROWS, BLOCK]
        value = tl.load(x + row[:, None] * x_stride + column, mask=there, other=float("-inf"))
        value = value.to(tl.float32)
        # A positive scale can wait until the maximum is subtracted, which is exact: no large number is ever rounded.
        unit = scale * LOG2E
        if not RISING:
            value *= scale
            unit = LOG2E
        inside = here & (column < width)
        if MASKED:
            offset = mask_offsets(row, mask_middle, mask_inner, outer_stride, middle_stride, inner_stride)[:, None]
            shown = tl.load(mask + offset + column * column_stride, mask=inside, other=0) != 0
            value = tl.where(shown, value, float("-inf"))
        if CAUSAL or not RISING:
            value = tl.where(column < seen, value, float("-inf"))
        power = tl.exp2((value - finite(tl.max(value, 1), SOFTMAX)[:, None]) * unit)
        result = power * inverse(tl.sum(power, 1))[:, None]
        tl.store(y + row[:, None] * width + column, result, mask=inside)


@triton.jit
def softmax_backward_rows(
    dy, y, dx,
    dy_stride, y_stride, rows, width, scale, queries,
    CAUSAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx = y * (dy - sum(y * dy)) * scale; what the mask hides has y = 0, so the mask is not read again."""
    column = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    for begin in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = (begin + tl.arange(0, ROWS)).to(tl.int64)  # [ROWS]
        here = (row < rows)[:, None]  # [ROWS, 1]
        there = here & loadable(visible_columns(row, width, queries, CAUSAL)[:, None], column, width, CAUSAL)
        weight = tl.load(y + row[:, None] * y_stride + column, mask=there, other=0.0)
        gradient = tl.load(dy + row[:, None] * dy_stride + column, mask=there, other=0.0)
        weight, gradient = weight.to(tl.float32), gradient.to(tl.float32)  # [ROWS, BLOCK]
        along = tl.sum(weight * gradient, 1)[:, None]  # [ROWS, 1]
        result = weight * (gradient - along) * scale
        tl.store(dx + row[:, None] * width + column, result, mask=here & (column < width))


def softmax(x: torch.Tensor, mask: MaskRows, scale: float, queries: int) -> torch.Tensor:
    """The softmax of scale * x [rows, width] over what each row sees; queries > 0 says causal."""
    rows, width = x.shape
    block = tile_width(width)
    if block is None:
        pairs = reduce_pairs(x, None, kinds.SOFTMAX, scale, queries, mask)
        return spread(x, None, *pairs, kinds.SOFTMAX, scale, queries, mask)
    y = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    facts = device.facts(x.device)
    config = tune.pick(SOFTMAX_FORWARD, facts, shape_of(x))
    programs = programs_of(config, facts, rows, width)
    launch(
        softmax_forward, (programs,),
        x, mask.tensor, y, x.stride(0), rows, width, scale, queries, *mask.sizes, *mask.strides,
        MASKED=mask.tensor is not None, CAUSAL=queries > 0, RISING=scale > 0,
        ROWS=config.rows, BLOCK=block, STAGES=config.stages if programs * config.rows < rows else 1,
        num_warps=config.warps,
    )  # fmt: skip
    return y


def softmax_backward(dy: torch.Tensor, y: torch.Tensor, scale: float, queries: int) -> torch.Tensor:
    """dx [rows, width] from dy and the softmax y."""
    rows, width = y.shape
    block = tile_width(width)
    if block is None:
        pairs = reduce_pairs(y, dy, kinds.WEIGHTED, queries=queries)
        return spread(y, dy, *pairs, kinds.SOFTMAX_BACKWARD, scale, queries)
    dx = torch.empty((rows, width), dtype=y.dtype, device=y.device)
    facts = device.facts(y.device)
    config = tune.pick(SOFTMAX_BACKWARD, facts, shape_of(dy))
    programs = programs_of(config, facts, rows, width)
    launch(
        softmax_backward_rows, (programs,),
        dy, y, dx, dy.stride(0), y.stride(0), rows, width, scale, queries,
        CAUSAL=queries > 0, ROWS=config.rows, BLOCK=block,
        STAGES=config.stages if programs * config.rows < rows else 1, num_warps=config.warps,
    )  # fmt: skip
    return dx
