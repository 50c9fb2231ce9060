"""Cross-entropy in Triton, and the fused linear form that never holds all logits.

One program scans one row: a single read gives the normaliser (running maximum and sum) and the loss. A second scan
of the same row, which by then lies in the L2 cache, can turn the logits into their gradient in place: that is how
the fused linear form gets all its gradients from one chunk of logits before the next chunk overwrites it.
"""

import torch
import triton
import triton.language as tl

from flashkernel.core import device, tune
from flashkernel.core.launch import launch
from flashkernel.ops.loss.configs import BACKWARD, FORWARD, IN_PLACE, Scan, Settings

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load_logits(row, column, classes, softcap, CAP: tl.constexpr):
    """A block of a row in float32, capped; -inf beyond its end."""
    value = tl.load(row + column, mask=column < classes, other=float("-inf")).to(tl.float32)
    if CAP:
        value = tl.where(column < classes, softcap * (2 * tl.sigmoid(2 * value / softcap) - 1), float("-inf"))
    return value


@triton.jit
def _write_gradient(
    logits, gradient, classes, label, normaliser, weight, smoothing, z_loss, softcap,
    CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """gradient = weight * d loss / d logits for one row; `logits` and `gradient` may be the same memory."""
    blocks = tl.cdiv(classes, BLOCK)
    for index in range(blocks):
        column = (blocks - 1 - index) * BLOCK + tl.arange(0, BLOCK)  # from the end: that was read last
        value = _load_logits(logits, column, classes, softcap, CAP)
        slope = tl.exp2((value - normaliser) * LOG2E) * (1 + 2 * z_loss * normaliser) - smoothing / classes
        slope = tl.where(column == label, slope - (1 - smoothing), slope)
        if CAP:
            slope *= 1 - (value / softcap) * (value / softcap)
        tl.store(gradient + column, slope * weight, mask=column < classes)


@triton.jit
def cross_entropy_forward(
    logits, target, loss, normalisers, count,
    stride, classes, ignore_index, smoothing, z_loss, softcap,
    IN_PLACE_GRADIENT: tl.constexpr, SMOOTH: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    label = tl.load(target + program)
    row = logits + program * stride
    scanned = tl.where(label == ignore_index, 0, classes)  # an ignored row is not read
    largest = float("-inf")
    total = 0.0  # sum of exp(logit - largest)
    plain = 0.0  # sum of logits
    for start in tl.range(0, scanned, BLOCK, num_stages=STAGES):
        column = start + tl.arange(0, BLOCK)
        value = _load_logits(row, column, classes, softcap, CAP)
        higher = tl.maximum(largest, tl.max(value, 0))
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp2((largest - anchor) * LOG2E) + tl.sum(tl.exp2((value - anchor) * LOG2E), 0)
        largest = higher
        if SMOOTH:
            plain += tl.sum(tl.where(column < classes, value, 0.0), 0)
    normaliser = tl.where(largest == float("-inf"), float("-inf"), largest + tl.log2(total) / LOG2E)
    known = (label >= 0) & (label < classes)
    chosen = tl.load(row + label, mask=known & (scanned > 0), other=0.0).to(tl.float32)
    if CAP:
        chosen = softcap * (2 * tl.sigmoid(2 * chosen / softcap) - 1)
    value = normaliser - (1 - smoothing) * chosen - smoothing * plain / classes + z_loss * normaliser * normaliser
    # A label out of range is never used as an address; its loss and gradient are NaN, so that the mistake shows.
    value = tl.where(known, value, float("nan"))
    value = tl.where(scanned > 0, value, 0.0)
    tl.store(loss + program, value)
    tl.store(normalisers + program, tl.where(scanned > 0, normaliser, 0.0))
    if IN_PLACE_GRADIENT:
        weight = 1.0
        if count is not None:
            weight = 1.0 / tl.maximum(tl.load(count), 1).to(tl.float32)
        if scanned > 0:
            weight = tl.where(known, weight, float("nan"))
            _write_gradient(row, row, classes, label, normaliser, weight, smoothing, z_loss, softcap, CAP, BLOCK)
        else:
            for start in range(0, classes, BLOCK):
                column = start + tl.arange(0, BLOCK)
                tl.store(row + column, tl.zeros([BLOCK], tl.float32), mask=column < classes)


@triton.jit
def cross_entropy_backward(
    logits, target, normalisers, upstream, count, gradient,
    stride, gradient_stride, upstream_stride, classes, ignore_index, smoothing, z_loss, softcap,
    CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    label = tl.load(target + program)
    weight = tl.load(upstream + program * upstream_stride).to(tl.float32)
    if count is not None:
        weight /= tl.maximum(tl.load(count), 1).to(tl.float32)
    row = gradient + program * gradient_stride
    if label == ignore_index:
        for start in range(0, classes, BLOCK):
            column = start + tl.arange(0, BLOCK)
            tl.store(row + column, tl.zeros([BLOCK], tl.float32), mask=column < classes)
    else:
        weight = tl.where((label >= 0) & (label < classes), weight, float("nan"))
        normaliser = tl.load(normalisers + program)
        _write_gradient(
            logits + program * stride, row, classes, label, normaliser, weight, smoothing, z_loss, softcap, CAP, BLOCK
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
def scale(values, result, factor, size, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr):
    """result = values * factor; in place it costs nothing where the factor is one, as it is after loss.backward()."""
    by = tl.load(factor).to(tl.float32)
    if (by != 1.0) or (not IN_PLACE):
        place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        scaled = tl.load(values + place, mask=place < size).to(tl.float32) * by
        tl.store(result + place, scaled, mask=place < size)


def _scan(tunable: tune.Tunable, logits: torch.Tensor) -> Scan:
    shape = {"classes": logits.shape[1], "bytes": logits.element_size()}
    return tune.pick(tunable, device.facts(logits.device), shape)


def scan_forward(
    logits: torch.Tensor,
    target: torch.Tensor,
    loss: torch.Tensor,
    normalisers: torch.Tensor,
    count: torch.Tensor | None,
    settings: Settings,
    in_place_gradient: bool,
) -> None:
    """Fill loss and normalisers of each row; with `in_place_gradient`, turn the logits into their gradient."""
    config = _scan(IN_PLACE if in_place_gradient else FORWARD, logits)
    launch(
        cross_entropy_forward, (logits.shape[0],),
        logits, target, loss, normalisers, count,
        logits.stride(0), logits.shape[1], settings.ignore_index, settings.smoothing, settings.z_loss, settings.softcap,
        IN_PLACE_GRADIENT=in_place_gradient, SMOOTH=settings.smoothing > 0, CAP=settings.softcap > 0,
        BLOCK=config.block, STAGES=config.stages, num_warps=config.warps,
    )  # fmt: skip


def scan_backward(
    logits: torch.Tensor,
    target: torch.Tensor,
    normalisers: torch.Tensor,
    upstream: torch.Tensor,
    count: torch.Tensor | None,
    gradient: torch.Tensor,
    settings: Settings,
) -> None:
    """Fill the gradient of each row of logits; `gradient` may be the logits themselves."""
    config = _scan(BACKWARD, logits)
    launch(
        cross_entropy_backward, (logits.shape[0],),
        logits, target, normalisers, upstream, count, gradient,
        logits.stride(0), gradient.stride(0), upstream.stride(0) if upstream.ndim else 0,
        logits.shape[1], settings.ignore_index, settings.smoothing, settings.z_loss, settings.softcap,
        CAP=settings.softcap > 0, BLOCK=config.block, num_warps=config.warps,
    )  # fmt: skip


def reduced(loss: torch.Tensor, target: torch.Tensor, settings: Settings) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum or mean of the rows' losses, number of rows not ignored)."""
    result = torch.empty((), dtype=torch.float32, device=loss.device)
    count = torch.empty((), dtype=torch.int32, device=loss.device)
    launch(
        reduce_losses, (1,), loss, target, result, count, loss.shape[0], settings.ignore_index,
        MEAN=settings.reduction == "mean", BLOCK=min(4096, tune.power_of_2(max(1, loss.shape[0]))), num_warps=8,
    )  # fmt: skip
    return result, count


def forward(
    logits: torch.Tensor, target: torch.Tensor, settings: Settings
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(loss, normalisers, count) of [rows, classes] logits; the loss has one element, or one a row with "none"."""
    loss = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    normalisers = torch.empty_like(loss)
    scan_forward(logits, target, loss, normalisers, None, settings, False)
    if settings.reduction == "none":
        return loss, normalisers, torch.empty(0, dtype=torch.int32, device=logits.device)
    result, count = reduced(loss, target, settings)
    return result, normalisers, count


def backward(
    upstream: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    normalisers: torch.Tensor,
    count: torch.Tensor,
    settings: Settings,
) -> torch.Tensor:
    """Gradient of the logits."""
    gradient = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    divisor = count if settings.reduction == "mean" else None
    scan_backward(logits, target, normalisers, upstream, divisor, gradient, settings)
    return gradient


def scaled(values: torch.Tensor, factor: torch.Tensor, in_place: bool) -> torch.Tensor:
    """values * factor for a contiguous tensor and a factor that lives on the device."""
    result = values if in_place else torch.empty_like(values)
    grid = (tune.ceil_div(values.numel(), 4096),)
    launch(scale, grid, values, result, factor, values.numel(), IN_PLACE=in_place, BLOCK=4096, num_warps=8)
    return result
