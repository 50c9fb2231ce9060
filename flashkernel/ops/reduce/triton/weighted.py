"""The way back of the weighted row sum, y[r] = sum over c of x[r, c] * weight[c].

    dx[r, c] = dy[r] * weight[c]          dweight[c] = sum over r of dy[r] * x[r, c]

Programs own a block of columns and loop over a part of the rows, adding dweight in registers; a second, small kernel
adds the shares.
"""

import torch
import triton
import triton.language as tl

from flashkernel.core import device, tune
from flashkernel.core.launch import launch
from flashkernel.ops.reduce.configs import COLUMN_SUM, WEIGHTED_BACKWARD, programs_of
from flashkernel.ops.reduce.triton.reduction import shape_of


@triton.jit
def weighted_backward_rows(
    x, weight, dy, dx, partial,
    x_stride, rows, width, blocks, row_programs,
    WANT_X: tl.constexpr, WANT_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row_program = program // blocks
    begin = (program % blocks).to(tl.int64) * BLOCK
    column = tl.arange(0, BLOCK)  # [BLOCK]
    in_width = column < width - begin
    source = x + begin + column[None, :]  # [1, BLOCK]
    target = dx + begin + column[None, :]
    if WANT_X:
        factor = tl.load(weight + begin + column, mask=in_width, other=0.0).to(tl.float32)[None, :]  # [1, BLOCK]
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in tl.range(row_program * ROWS, rows, row_programs * ROWS, num_stages=NUM_STAGES):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)  # [ROWS]
        inside = (row < rows)[:, None] & in_width[None, :]  # [ROWS, BLOCK]
        gradient = tl.load(dy + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]  # [ROWS, 1]
        if WANT_WEIGHT:
            total += tl.load(source + row[:, None] * x_stride, mask=inside, other=0.0).to(tl.float32) * gradient
        if WANT_X:
            tl.store(target + row[:, None] * width, gradient * factor, mask=inside)
    if WANT_WEIGHT:
        tl.store(partial + row_program.to(tl.int64) * width + begin + column, tl.sum(total, 0), mask=in_width)


@triton.jit
def sum_columns(partial, result, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """result[c] = sum over r of partial[r, c], in a fixed order."""
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    column = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    in_width = column < width - begin
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(0, rows, ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None]  # [ROWS, 1]
        total += tl.load(partial + row * width + begin + column, mask=(row < rows) & in_width, other=0.0)
    tl.store(result + begin + column, tl.sum(total, 0)[None, :], mask=in_width)


def weighted_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, want_x: bool, want_weight: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dx, dweight) from dy [rows], x [rows, width] and weight [width]; the one not wanted comes back empty."""
    rows, width = x.shape
    props = device.properties(x.device)
    config = tune.pick(WEIGHTED_BACKWARD, props, shape_of(x))
    blocks = tune.ceil_div(width, config.block)
    row_programs = programs_of(config, props, rows, blocks)
    dx = torch.empty((rows, width) if want_x else 0, dtype=x.dtype, device=x.device)
    # One row_program's share is the whole gradient; several leave theirs in float32, to be added.
    share = weight.dtype if row_programs == 1 else torch.float32
    partial = torch.empty((row_programs, width) if want_weight else 0, dtype=share, device=x.device)
    launch(
        weighted_backward_rows, (blocks * row_programs,),
        x, weight, dy, dx, partial, x.stride(0), rows, width, blocks, row_programs,
        WANT_X=want_x, WANT_WEIGHT=want_weight, ROWS=config.rows, BLOCK=config.block,
        NUM_STAGES=config.num_stages if row_programs * config.rows < rows else 1, num_warps=config.num_warps,
    )  # fmt: skip
    if not want_weight:
        return dx, weight.new_empty(0)
    return dx, partial.view(width) if row_programs == 1 else _summed(partial, weight.dtype)


def _summed(partial: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The column sums of [rows, width] in `dtype`."""
    rows, width = partial.shape
    result = torch.empty(width, dtype=dtype, device=partial.device)
    config = tune.pick(COLUMN_SUM, device.properties(partial.device), {"rows": rows, "width": width})
    grid = (tune.ceil_div(width, config.block),)
    launch(
        sum_columns, grid, partial, result, rows, width,
        ROWS=config.rows, BLOCK=config.block, num_warps=config.num_warps,
    )  # fmt: skip
    return result
