"""Softmax of rows that fit a tile: one read, one write. Longer rows are reduced first and spread back after."""

import torch
import triton
import triton.language as tl

from flashkernel.blocks.pdl_triton import pdl_enter
from flashkernel.blocks.softmax_triton import LOG2E
from flashkernel.blocks.widen_triton import widen_again
from flashkernel.core import device, tune
from flashkernel.core.launch import launch, pdl_options
from flashkernel.ops.reduce import kinds
from flashkernel.ops.reduce.configs import SOFTMAX_BACKWARD, SOFTMAX_FORWARD, tile_width
from flashkernel.ops.reduce.masks import MaskRows, Scores
from flashkernel.ops.reduce.triton.reduction import (
    SOFTMAX,
    finite,
    inverse,
    loadable,
    mask_offsets,
    reduce_partials,
    shape_of,
    spread,
    visible_columns,
)


@triton.jit
def _tile_rows(rows, ROWS: tl.constexpr):
    """(row numbers, which of them exist) of this program, [ROWS] and [ROWS, 1]."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return row, ((row < rows) | (ROWS == 1))[:, None]


@triton.jit
def _to_load(row, column, in_width, width, seqlen_q, CAUSAL: tl.constexpr):
    """Which columns to load, [ROWS, BLOCK] or [1, BLOCK]."""
    if CAUSAL:
        return loadable(visible_columns(row, width, seqlen_q, True)[:, None], column, width, True)
    else:
        return in_width


@triton.jit
def softmax_forward(
    x, mask, y,
    x_stride, rows, width, scale, seqlen_q, mask_layout,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, POSITIVE_SCALE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, FULL_WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """RISING says that scale > 0: then -inf, which stands for columns beyond the row, survives the scaling.

    FULL_WIDTH: the row is as wide as the block."""
    if PDL:
        pdl_enter()
    row, here = _tile_rows(rows, ROWS)
    column = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    in_width = (column < width) | FULL_WIDTH
    inside = here & in_width  # [ROWS, BLOCK]
    there = here & _to_load(row, column, in_width, width, seqlen_q, CAUSAL)
    value = tl.load(x + row[:, None] * x_stride + column, mask=there, other=float("-inf")).to(tl.float32)
    # A positive scale can wait until the maximum is subtracted, which is exact: no large number is ever rounded.
    unit = scale * LOG2E
    if not POSITIVE_SCALE:
        value *= scale
        unit = LOG2E
    if MASKED:
        offset = mask_offsets(row, mask_layout)[:, None]
        unmasked = tl.load(mask + offset + column * mask_layout.column_stride, mask=inside, other=0) != 0
        value = tl.where(unmasked, value, float("-inf"))
    if CAUSAL or not POSITIVE_SCALE:
        value = tl.where(column < visible_columns(row, width, seqlen_q, CAUSAL)[:, None], value, float("-inf"))
    exponentials = tl.exp2((value - finite(tl.max(value, 1), SOFTMAX)[:, None]) * unit)
    result = exponentials * inverse(tl.sum(exponentials, 1))[:, None]
    tl.store(y + row[:, None] * width + column, result, mask=inside)


@triton.jit
def softmax_backward_rows(
    dy, y, dx,
    dy_stride, y_stride, rows, width, scale, seqlen_q,
    CAUSAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, FULL_WIDTH: tl.constexpr,
):  # fmt: skip
    """dx = y * (dy - sum(y * dy)) * scale; what the mask hides has y = 0, so the mask is not read again."""
    row, here = _tile_rows(rows, ROWS)
    column = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    in_width = (column < width) | FULL_WIDTH
    there = here & _to_load(row, column, in_width, width, seqlen_q, CAUSAL)
    weight = tl.load(y + row[:, None] * y_stride + column, mask=there, other=0.0)
    gradient = tl.load(dy + row[:, None] * dy_stride + column, mask=there, other=0.0)
    dot = tl.sum(weight.to(tl.float32) * gradient.to(tl.float32), 1)[:, None]  # [ROWS, 1]
    result = widen_again(weight) * (widen_again(gradient) - dot) * scale
    tl.store(dx + row[:, None] * width + column, result, mask=here & in_width)


def softmax(x: torch.Tensor, mask: MaskRows, scale: float, seqlen_q: int) -> torch.Tensor:
    """The softmax of scale * x [rows, width] over what each row sees; seqlen_q > 0 says causal."""
    rows, width = x.shape
    block = tile_width(width)
    if block is None:
        scores = Scores(scale, seqlen_q, mask)
        return spread(x, None, reduce_partials(x, None, kinds.SOFTMAX, scores), kinds.SOFTMAX, scores)
    y = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    props = device.properties(x.device)
    config = tune.pick(SOFTMAX_FORWARD, props, shape_of(x))
    launch(
        softmax_forward, (tune.ceil_div(rows, config.rows) if width else 0,),
        x, mask.tensor, y, x.stride(0), rows, width, scale, seqlen_q, mask.layout,
        MASKED=mask.tensor is not None, CAUSAL=seqlen_q > 0, POSITIVE_SCALE=scale > 0,
        ROWS=config.rows, BLOCK=block, FULL_WIDTH=width == block, num_warps=config.num_warps,
        **pdl_options(props, 2 * x.nbytes),
    )  # fmt: skip
    return y


def softmax_backward(dy: torch.Tensor, y: torch.Tensor, scale: float, seqlen_q: int) -> torch.Tensor:
    """dx [rows, width] from dy and the softmax y."""
    rows, width = y.shape
    block = tile_width(width)
    if block is None:
        sums = reduce_partials(y, dy, kinds.WEIGHTED, Scores(seqlen_q=seqlen_q))
        return spread(y, dy, sums, kinds.SOFTMAX_BACKWARD, Scores(scale, seqlen_q))
    dx = torch.empty((rows, width), dtype=y.dtype, device=y.device)
    config = tune.pick(SOFTMAX_BACKWARD, device.properties(y.device), shape_of(dy))
    launch(
        softmax_backward_rows, (tune.ceil_div(rows, config.rows) if width else 0,),
        dy, y, dx, dy.stride(0), y.stride(0), rows, width, scale, seqlen_q,
        CAUSAL=seqlen_q > 0, ROWS=config.rows, BLOCK=block, FULL_WIDTH=width == block, num_warps=config.num_warps,
    )  # fmt: skip
    return dx
