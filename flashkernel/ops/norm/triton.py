"""RMSNorm and LayerNorm in Triton: one forward and one backward kernel for both.

Forward: a tile holds whole rows, so each element is read once and written once. Backward: as many programs as the
GPU holds at once loop over the rows (persistent), each accumulating its part of the weight gradient in registers; the
next rows are copied to shared memory meanwhile, which hides the latency of memory. A second, small kernel adds the
partial weight gradients.
"""

import torch
import triton
import triton.language as tl

from flashkernel.blocks.pdl_triton import pdl_enter
from flashkernel.blocks.widen_triton import widen_again
from flashkernel.core import device, tune
from flashkernel.core.launch import launch, pdl_options
from flashkernel.core.versions import triton_version
from flashkernel.ops.norm.configs import (
    BACKWARD,
    COLUMN_SUM,
    FORWARD,
    MAX_HELD_WIDTH,
    MIN_SHIFTED_WIDTH,
    PREFETCH_VALUES,
    streaming,
)

_POLICY = {False: "", True: "evict_first"}
SAMPLES = tl.constexpr(8)  # of a row: in half precision, LayerNorm measures deviations from their mean


@triton.jit
def _load_row(vector, columns, inside, EXISTS: tl.constexpr):
    if EXISTS:
        return tl.load(vector + columns, mask=inside, other=0.0).to(tl.float32)
    else:
        return tl.zeros_like(columns).to(tl.float32)


@triton.jit
def _add2(a, b, c, d):
    return a + c, b + d


@triton.jit
def norm_forward(
    x, residual, weight, bias, y, total, mean, rstd,
    x_stride, residual_stride, rows, width, eps, offset,
    RMS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, FULL_WIDTH: tl.constexpr, PREFETCH_WEIGHT: tl.constexpr,
    SHIFTED: tl.constexpr, LOAD_POLICY: tl.constexpr, STORE_POLICY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """FULL_WIDTH: a row is as wide as the block. PREFETCH_WEIGHT: the weight is loaded before the row is reduced.

    SHIFTED, for half-precision x: LayerNorm sums (x - pivot) and (x - pivot)^2 in one reduction, where the pivot is the
    mean of SAMPLES values of the row. No value lies farther than sqrt(width) standard deviations from the row's mean,
    so with one such outlier among n samples the variance loses width / n^2 roundings of float32: less than the
    rounding of the output.
    """
    if PDL:
        pdl_enter()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    exists = (row < rows) | (ROWS == 1)
    x_row, residual_row, offset_out = row[:, None] * x_stride, row[:, None] * residual_stride, row[:, None] * width
    column = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    in_width = (column < width) | FULL_WIDTH
    inside = exists[:, None] & in_width  # [ROWS, BLOCK]
    x_raw = tl.load(x + x_row + column, mask=inside, other=0.0, eviction_policy=LOAD_POLICY)
    value = x_raw.to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + residual_row + column, mask=inside, other=0.0)
        tl.store(total + offset_out + column, value, mask=inside)
    if PREFETCH_WEIGHT:
        scale = _load_row(weight, column, in_width, HAS_WEIGHT)  # [1, BLOCK]
        shift = _load_row(bias, column, in_width, HAS_BIAS)
    row_mean = tl.zeros([ROWS, 1], tl.float32)
    if RMS:
        variance = tl.sum(value * value, 1)[:, None] / width  # [ROWS, 1]
    elif SHIFTED:
        pivot = tl.zeros([ROWS, 1], tl.float32)
        for sample in tl.static_range(SAMPLES):
            at = sample * (width // SAMPLES)
            pivot += tl.load(x + x_row + at, mask=exists[:, None], other=0.0).to(tl.float32) / SAMPLES
            if HAS_RESIDUAL:
                pivot += tl.load(residual + residual_row + at, mask=exists[:, None], other=0.0).to(tl.float32) / SAMPLES
        centered = tl.where(inside, value - pivot, 0.0)
        sum1, sum2 = tl.reduce((centered, centered * centered), 1, _add2)
        shift = sum1[:, None] / width
        row_mean = pivot + shift
        variance = tl.maximum(sum2[:, None] / width - shift * shift, 0.0)
    else:
        row_mean = tl.sum(value, 1)[:, None] / width
        centered = tl.where(inside, value - row_mean, 0.0)
        variance = tl.sum(centered * centered, 1)[:, None] / width
    inv_std = tl.rsqrt(variance + eps)
    if not RMS:
        tl.store(mean + row[:, None], row_mean, mask=exists[:, None])
    tl.store(rstd + row[:, None], inv_std, mask=exists[:, None])
    if (
        not HAS_RESIDUAL and not PREFETCH_WEIGHT
    ):  # where a thread has many values, their float32 copies cost too many registers
        value = widen_again(x_raw)
    result = (value - row_mean) * inv_std
    if not PREFETCH_WEIGHT:
        scale = _load_row(weight, column, in_width, HAS_WEIGHT)
        shift = _load_row(bias, column, in_width, HAS_BIAS)
    if HAS_WEIGHT:
        result *= scale + offset
    if HAS_BIAS:
        result += shift
    tl.store(y + offset_out + column, result, mask=inside, eviction_policy=STORE_POLICY)


@triton.jit
def norm_backward(
    dy, dtotal, total, weight, mean, rstd, dx, dweight, dbias,
    dy_stride, dtotal_stride, total_stride, rows, width, offset,
    RMS: tl.constexpr, HAS_DTOTAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, NUM_STAGES: tl.constexpr, FULL_WIDTH: tl.constexpr, RELOAD: tl.constexpr,
    RECOMPUTE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    step = tl.num_programs(0) * ROWS
    column = tl.arange(0, BLOCK)  # [BLOCK]
    lane = tl.arange(0, ROWS)  # [ROWS]
    in_width = (column < width) | FULL_WIDTH
    if not RELOAD:
        scale = _load_row(weight, column, in_width, HAS_WEIGHT) + offset  # [BLOCK]
    weight_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    bias_sum = tl.zeros([ROWS, BLOCK], tl.float32)

    for first in tl.range(program * ROWS, rows, step, num_stages=NUM_STAGES):
        row = (first + lane).to(tl.int64)
        inside = (row < rows)[:, None] & in_width[None, :]
        x_raw = tl.load(total + row[:, None] * total_stride + column[None, :], mask=inside, other=0.0)
        value = x_raw.to(tl.float32)
        gradient = tl.load(dy + row[:, None] * dy_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        inv_std = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]  # [ROWS, 1]
        if RMS:
            x_hat = value * inv_std
        else:
            row_mean = tl.load(mean + row, mask=row < rows, other=0.0)[:, None]  # [ROWS, 1]
            x_hat = (value - row_mean) * inv_std
        if HAS_WEIGHT:
            weight_sum += gradient * x_hat
        if HAS_BIAS:
            bias_sum += gradient
        if HAS_WEIGHT:
            if RELOAD:  # a wide row leaves no registers for the weight; it stays in the L1 cache
                scale = tl.load(weight + column, mask=in_width, other=0.0, eviction_policy="evict_last") + offset
            gradient *= scale[None, :]
        if RMS:
            result = gradient - x_hat * (tl.sum(x_hat * gradient, 1) / width)[:, None]
        else:
            dot, total_dy = tl.reduce((x_hat * gradient, gradient), 1, _add2)  # one reduction across warps
            if RECOMPUTE:
                x_hat = (widen_again(x_raw) - row_mean) * inv_std
            result = gradient - x_hat * (dot / width)[:, None] - (total_dy / width)[:, None]
        result *= inv_std
        if HAS_DTOTAL:
            result += tl.load(dtotal + row[:, None] * dtotal_stride + column[None, :], mask=inside, other=0.0)
        tl.store(dx + row[:, None] * width + column[None, :], result, mask=inside)

    if HAS_WEIGHT:
        tl.store(dweight + program.to(tl.int64) * width + column, tl.sum(weight_sum, 0), mask=in_width)
    if HAS_BIAS:
        tl.store(dbias + program.to(tl.int64) * width + column, tl.sum(bias_sum, 0), mask=in_width)


@triton.jit
def column_sum(partial, result, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """result[c] = sum over r of partial[r, c], in a fixed order."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        total += tl.load(partial + row[:, None].to(tl.int64) * width + column[None, :], mask=inside, other=0.0)
    tl.store(result + column, tl.sum(total, 0), mask=column < width)


def forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    eps: float,
    offset: float,
    rms: bool,
    shape: torch.Size,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y, total, mean, rstd) of x and residual seen as [rows, width]; what is not needed comes back empty."""
    rows, width = x.shape
    y = torch.empty(shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(y) if residual is not None else y.new_empty(0)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    mean = torch.empty(0 if rms else rows, dtype=torch.float32, device=x.device)
    props = device.properties(x.device)
    sizes = {"rows": rows, "width": width, "bytes": x.element_size(), "sums": 1 if rms else 2}
    config = tune.pick(FORWARD, props, sizes)
    block = tune.power_of_2(width)
    read, written = streaming(props, 2 * x.nbytes, width)
    launch(
        norm_forward, (tune.ceil_div(rows, config.rows),),
        x, residual, weight, bias, y, total, mean, rstd,
        x.stride(0), 0 if residual is None else residual.stride(0), rows, width, eps, offset,
        RMS=rms, HAS_RESIDUAL=residual is not None, HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None,
        ROWS=config.rows, BLOCK=block, FULL_WIDTH=width == block,
        SHIFTED=x.element_size() == 2 and width >= MIN_SHIFTED_WIDTH,
        LOAD_POLICY=_POLICY[read], STORE_POLICY=_POLICY[written],
        PREFETCH_WEIGHT=config.rows * block <= PREFETCH_VALUES * 32 * config.num_warps, num_warps=config.num_warps,
        **pdl_options(props, 2 * x.nbytes),
    )  # fmt: skip
    return y, total, mean, rstd


def backward(
    dy: torch.Tensor,
    dtotal: torch.Tensor | None,
    total: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    bias_dtype: torch.dtype | None,
    offset: float,
    rms: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dx, dweight, dbias) for [rows, width] gradients; a gradient without its parameter comes back empty."""
    rows, width = dy.shape
    props = device.properties(dy.device)
    reload = width > MAX_HELD_WIDTH
    recompute = reload and not rms and (triton_version() or (0, 0)) >= (3, 9)  # whose code has no registers to spare
    streams = 2 + (dtotal is not None) + reload  # what each row loads
    shape = {"rows": rows, "width": width, "bytes": dy.element_size(), "streams": streams}
    config = tune.pick(BACKWARD, props, shape)
    programs = max(1, min(tune.ceil_div(rows, config.rows), config.programs_per_sm * props.sms))
    dx = torch.empty((rows, width), dtype=total.dtype, device=dy.device)
    has_weight, has_bias = weight is not None, bias_dtype is not None
    dweight = torch.empty((programs, width) if has_weight else 0, dtype=torch.float32, device=dy.device)
    dbias = torch.empty((programs, width) if has_bias else 0, dtype=torch.float32, device=dy.device)
    launch(
        norm_backward, (programs,),
        dy, dtotal, total, weight, mean, rstd, dx, dweight, dbias,
        dy.stride(0), 0 if dtotal is None else dtotal.stride(0), total.stride(0), rows, width, offset,
        RMS=rms, HAS_DTOTAL=dtotal is not None, HAS_WEIGHT=has_weight, HAS_BIAS=has_bias,
        ROWS=config.rows, BLOCK=tune.power_of_2(width), NUM_STAGES=config.num_stages,
        FULL_WIDTH=width == tune.power_of_2(width), RELOAD=reload, RECOMPUTE=recompute, num_warps=config.num_warps,
    )  # fmt: skip
    return dx, _column_sum(dweight, None if weight is None else weight.dtype), _column_sum(dbias, bias_dtype)


def _column_sum(partial: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    if dtype is None:
        return partial
    rows, width = partial.shape
    result = torch.empty(width, dtype=dtype, device=partial.device)
    config = tune.pick(COLUMN_SUM, device.properties(partial.device), {"rows": rows, "width": width})
    grid = (tune.ceil_div(width, config.block),)
    launch(
        column_sum, grid, partial, result, rows, width, ROWS=config.rows, BLOCK=config.block, num_warps=config.num_warps
    )
    return result
