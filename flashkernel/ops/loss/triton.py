"""Cross-entropy in Triton, and the fused linear form that never holds all logits.

One program scans one row: a single read gives the LSE (running maximum and sum) and the loss. A second scan
of the same row, which by then lies in the L2 cache, can turn the logits into their gradient in place: that is how
the fused linear form gets all its gradients from one chunk of logits before the next chunk overwrites it.
"""

import torch
import triton
import triton.language as tl

from flashkernel.blocks.softmax_triton import LOG2E, accurate_tanh
from flashkernel.core import device, tune
from flashkernel.core.launch import launch
from flashkernel.ops.loss.configs import BACKWARD, FORWARD, IN_PLACE, ScanConfig
from flashkernel.ops.loss.params import HALF_SCALE, LossParams


@triton.jit
def _load_logits(row, column, classes, softcap, SOFTCAP: tl.constexpr):
    """A block of a row in float32, capped; -inf beyond its end."""
    value = tl.load(row + column, mask=column < classes, other=float("-inf")).to(tl.float32)
    if SOFTCAP:
        value = tl.where(column < classes, softcap * accurate_tanh(value / softcap), float("-inf"))
    return value


@triton.jit
def _write_gradient(
    logits, dlogits, classes, label, row_lse, weight, label_smoothing, z_loss, softcap,
    SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dlogits = weight * d loss / d logits for one row; `logits` and `dlogits` may be the same memory."""
    blocks = tl.cdiv(classes, BLOCK)
    for index in range(blocks):
        column = (blocks - 1 - index) * BLOCK + tl.arange(0, BLOCK)  # from the end: that was read last
        value = _load_logits(logits, column, classes, softcap, SOFTCAP)
        grad = tl.exp2((value - row_lse) * LOG2E) * (1 + 2 * z_loss * row_lse) - label_smoothing / classes
        grad = tl.where(column == label, grad - (1 - label_smoothing), grad)
        if SOFTCAP:
            grad *= 1 - (value / softcap) * (value / softcap)
        tl.store(dlogits + column, grad * weight, mask=column < classes)


@triton.jit
def cross_entropy_forward(
    logits, target, loss, lse, count,
    stride, classes, ignore_index, label_smoothing, z_loss, softcap, stored_scale,
    IN_PLACE_GRADIENT: tl.constexpr, SMOOTH: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    label = tl.load(target + program)
    row = logits + program * stride
    scan_width = tl.where(label == ignore_index, 0, classes)  # an ignored row is not read
    row_max = float("-inf")
    row_sum = 0.0  # of exp(logit - row_max)
    logit_sum = 0.0
    for start in tl.range(0, scan_width, BLOCK, num_stages=NUM_STAGES):
        column = start + tl.arange(0, BLOCK)
        value = _load_logits(row, column, classes, softcap, SOFTCAP)
        new_max = tl.maximum(row_max, tl.max(value, 0))
        safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        row_sum = row_sum * tl.exp2((row_max - safe_max) * LOG2E) + tl.sum(tl.exp2((value - safe_max) * LOG2E), 0)
        row_max = new_max
        if SMOOTH:
            logit_sum += tl.sum(tl.where(column < classes, value, 0.0), 0)
    row_lse = tl.where(row_max == float("-inf"), float("-inf"), row_max + tl.log2(row_sum) / LOG2E)
    known = (label >= 0) & (label < classes)
    target_logit = tl.load(row + label, mask=known & (scan_width > 0), other=0.0).to(tl.float32)
    if SOFTCAP:
        target_logit = softcap * accurate_tanh(target_logit / softcap)
    value = (
        row_lse
        - (1 - label_smoothing) * target_logit
        - label_smoothing * logit_sum / classes
        + z_loss * row_lse * row_lse
    )
    # A label out of range is never used as an address; its loss and gradient are NaN.
    value = tl.where(known, value, float("nan"))
    value = tl.where(scan_width > 0, value, 0.0)
    tl.store(loss + program, value)
    tl.store(lse + program, tl.where(scan_width > 0, row_lse, 0.0))
    if IN_PLACE_GRADIENT:
        weight = 1.0
        if count is not None:
            number = tl.maximum(tl.load(count), 1).to(tl.float32)
            weight = tl.minimum(number, stored_scale) / number
        if scan_width > 0:
            weight = tl.where(known, weight, float("nan"))
            tl.debug_barrier()  # every thread has loaded the target's logit before one of them overwrites it
            _write_gradient(row, row, classes, label, row_lse, weight, label_smoothing, z_loss, softcap, SOFTCAP, BLOCK)
        else:
            for start in range(0, classes, BLOCK):
                column = start + tl.arange(0, BLOCK)
                tl.store(row + column, tl.zeros([BLOCK], tl.float32), mask=column < classes)


@triton.jit
def cross_entropy_backward(
    logits, target, lse, dloss, count, dlogits,
    stride, dlogits_stride, dloss_stride, classes, ignore_index, label_smoothing, z_loss, softcap,
    SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    label = tl.load(target + program)
    weight = tl.load(dloss + program * dloss_stride).to(tl.float32)
    if count is not None:
        weight /= tl.maximum(tl.load(count), 1).to(tl.float32)
    row = dlogits + program * dlogits_stride
    if label == ignore_index:
        for start in range(0, classes, BLOCK):
            column = start + tl.arange(0, BLOCK)
            tl.store(row + column, tl.zeros([BLOCK], tl.float32), mask=column < classes)
    else:
        weight = tl.where((label >= 0) & (label < classes), weight, float("nan"))
        row_lse = tl.load(lse + program)
        _write_gradient(
            logits + program * stride,
            row,
            classes,
            label,
            row_lse,
            weight,
            label_smoothing,
            z_loss,
            softcap,
            SOFTCAP,
            BLOCK,
        )


@triton.jit
def reduce_losses(loss, target, result, count, rows, ignore_index, MEAN: tl.constexpr, BLOCK: tl.constexpr):
    """result = sum or mean of the rows' losses, count = rows not ignored; one program, so the order is fixed."""
    total = tl.zeros([BLOCK], tl.float32)
    kept = tl.zeros([BLOCK], tl.int32)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        total += tl.load(loss + row, mask=row < rows, other=0.0)
        kept += (tl.load(target + row, mask=row < rows, other=ignore_index) != ignore_index).to(tl.int32)
    value = tl.sum(total, 0)
    number = tl.sum(kept, 0)
    if MEAN:
        value /= tl.maximum(number, 1).to(tl.float32)
    tl.store(result, value)
    tl.store(count, number)


@triton.jit
def count_targets(target, count, rows, ignore_index, BLOCK: tl.constexpr):
    """count = rows not ignored; one program."""
    kept = tl.zeros([BLOCK], tl.int32)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        kept += (tl.load(target + row, mask=row < rows, other=ignore_index) != ignore_index).to(tl.int32)
    tl.store(count, tl.sum(kept, 0))


@triton.jit
def scale(
    values, result, factor, count, size, stored_scale, SUMMED: tl.constexpr, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr
):
    """result = values * factor; with a count divided by min(count, stored_scale) and, if SUMMED, times the count. In
    place it costs nothing where that is one, as it is without a count after loss.backward()."""
    by = tl.load(factor).to(tl.float32)
    if count is not None:
        number = tl.maximum(tl.load(count), 1).to(tl.float32)
        by /= tl.minimum(number, stored_scale)
        if SUMMED:
            by *= number
    if (by != 1.0) or (not IN_PLACE):
        offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        scaled = tl.load(values + offset, mask=offset < size).to(tl.float32) * by
        tl.store(result + offset, scaled, mask=offset < size)


def _scan(tunable: tune.Tunable, logits: torch.Tensor) -> ScanConfig:
    shape = {"classes": logits.shape[1], "bytes": logits.element_size()}
    return tune.pick(tunable, device.properties(logits.device), shape)


def launch_forward(
    logits: torch.Tensor,
    target: torch.Tensor,
    loss: torch.Tensor,
    lse: torch.Tensor,
    count: torch.Tensor | None,
    params: LossParams,
    in_place_gradient: bool,
) -> None:
    """Fill loss and lse of each row; with `in_place_gradient`, turn the logits into their gradient. With a count it is
    divided by that, and multiplied by min(count, params.stored_scale(logits.dtype))."""
    config = _scan(IN_PLACE if in_place_gradient else FORWARD, logits)
    launch(
        cross_entropy_forward, (logits.shape[0],),
        logits, target, loss, lse, count,
        logits.stride(0), logits.shape[1], params.ignore_index, params.label_smoothing, params.z_loss, params.softcap,
        params.stored_scale(logits.dtype),
        IN_PLACE_GRADIENT=in_place_gradient, SMOOTH=params.label_smoothing > 0, SOFTCAP=params.softcap > 0,
        BLOCK=config.block, NUM_STAGES=config.num_stages, num_warps=config.num_warps,
    )  # fmt: skip


def launch_backward(
    logits: torch.Tensor,
    target: torch.Tensor,
    lse: torch.Tensor,
    dloss: torch.Tensor,
    count: torch.Tensor | None,
    dlogits: torch.Tensor,
    params: LossParams,
) -> None:
    """Fill the gradient of each row of logits; `dlogits` may be the logits themselves."""
    config = _scan(BACKWARD, logits)
    launch(
        cross_entropy_backward, (logits.shape[0],),
        logits, target, lse, dloss, count, dlogits,
        logits.stride(0), dlogits.stride(0), dloss.stride(0) if dloss.ndim else 0,
        logits.shape[1], params.ignore_index, params.label_smoothing, params.z_loss, params.softcap,
        SOFTCAP=params.softcap > 0, BLOCK=config.block, num_warps=config.num_warps,
    )  # fmt: skip


def counted(target: torch.Tensor, params: LossParams) -> torch.Tensor:
    """Number of rows that are not ignored, int32."""
    count = torch.empty((), dtype=torch.int32, device=target.device)
    launch(count_targets, (1,), target, count, target.shape[0], params.ignore_index, BLOCK=_block(target), num_warps=8)
    return count


def _block(target: torch.Tensor) -> int:
    return min(4096, tune.power_of_2(max(1, target.shape[0])))


def reduced(loss: torch.Tensor, target: torch.Tensor, params: LossParams) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum or mean of the rows' losses, number of rows not ignored)."""
    result = torch.empty((), dtype=torch.float32, device=loss.device)
    count = torch.empty((), dtype=torch.int32, device=loss.device)
    launch(
        reduce_losses, (1,), loss, target, result, count, loss.shape[0], params.ignore_index,
        MEAN=params.reduction == "mean", BLOCK=_block(target), num_warps=8,
    )  # fmt: skip
    return result, count


def forward(
    logits: torch.Tensor, target: torch.Tensor, params: LossParams
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(loss, lse, count) of [rows, classes] logits; the loss has one element, or one a row with "none"."""
    loss = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    lse = torch.empty_like(loss)
    launch_forward(logits, target, loss, lse, None, params, False)
    if params.reduction == "none":
        return loss, lse, torch.empty(0, dtype=torch.int32, device=logits.device)
    result, count = reduced(loss, target, params)
    return result, lse, count


def backward(
    dloss: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    lse: torch.Tensor,
    count: torch.Tensor,
    params: LossParams,
) -> torch.Tensor:
    """Gradient of the logits."""
    dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    divisor = count if params.reduction == "mean" else None
    launch_backward(logits, target, lse, dloss, divisor, dlogits, params)
    return dlogits


def scaled(
    values: torch.Tensor, factor: torch.Tensor, count: torch.Tensor | None, summed: bool, in_place: bool
) -> torch.Tensor:
    """values * factor for a contiguous tensor and a factor that lives on the device. A count is given for gradients in
    float16: those of a mean times min(count, HALF_SCALE), or of a sum divided by the count (`summed`)."""
    result = values if in_place else torch.empty_like(values)
    launch(
        scale, (tune.ceil_div(values.numel(), 4096),), values, result, factor, count, values.numel(), HALF_SCALE,
        SUMMED=summed, IN_PLACE=in_place, BLOCK=4096, num_warps=8,
    )  # fmt: skip
    return result
