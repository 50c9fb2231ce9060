"""The public losses: argument checks, dispatch, autograd."""

import torch
from torch import Tensor

from flashkernel.core.arguments import autocast, autocast_dtype, check_non_negative, check_softcap
from flashkernel.core.dispatch import choose
from flashkernel.core.library import KernelOp, traced
from flashkernel.core.op import resolve
from flashkernel.core.replay import replayed
from flashkernel.ops.loss import spec
from flashkernel.ops.loss.configs import Settings

REDUCTIONS = ("mean", "sum", "none")


@replayed
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    reduction: str = "mean",
    backend: str | None = None,
) -> Tensor:
    """Cross-entropy of logits (..., classes) against integer targets (...), in float32.

    `z_loss` adds z_loss * logsumexp(logits)^2, `softcap` bounds the logits to softcap * tanh(logits / softcap) first.
    "mean" is over the targets that are not ignored; where all are, the loss is 0 and so is its gradient (torch gives
    NaN). The kernels never read beyond a row: a target out of range makes its loss and gradient NaN.
    """
    _check("cross_entropy", logits, target, label_smoothing, z_loss, softcap, reduction)
    target = _indices(target)
    chosen = choose(spec.CROSS_ENTROPY, backend, logits.device, logits.dtype, classes=logits.shape[-1])
    if chosen.composite:
        return chosen.run(
            logits, target, ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss,
            softcap=softcap, reduction=reduction,
        )  # fmt: skip
    loss, _, _ = _cross_entropy(
        _flat(logits), _row(target), ignore_index, float(label_smoothing), float(z_loss), float(softcap),
        reduction, chosen.target,
    )  # fmt: skip
    return loss.view(target.shape) if reduction == "none" else loss


@replayed
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    reduction: str = "mean",
    backend: str | None = None,
) -> Tensor:
    """Cross-entropy of x @ weight^T + bias that never holds the logits: x is (..., hidden), weight (classes, hidden).

    The arguments are those of `cross_entropy`. Gradients are made in the forward pass, chunk by chunk ("none" computes
    the logits a second time in backward instead). Under autocast x, weight and bias are cast as for a linear layer.
    """
    _check_linear(x, weight, target, bias)
    _check("linear_cross_entropy", x, target, label_smoothing, z_loss, softcap, reduction)
    lower = autocast_dtype(x)
    if lower is not None:
        x, weight, bias = autocast(x, lower), autocast(weight, lower), None if bias is None else autocast(bias, lower)
    if weight.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
        raise ValueError(
            f"linear_cross_entropy: x is {x.dtype} but weight is {weight.dtype}; cast one, or use autocast"
        )
    target = _indices(target)
    chosen = choose(spec.LINEAR_CROSS_ENTROPY, backend, x.device, x.dtype, classes=weight.shape[0])
    if chosen.composite:
        return chosen.run(
            x, weight, target, bias, ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss,
            softcap=softcap, reduction=reduction,
        )  # fmt: skip
    wanted = [torch.is_grad_enabled() and value is not None and value.requires_grad for value in (x, weight, bias)]
    loss, _, _, _, _ = _linear(
        _flat(x), weight, bias, _row(target), ignore_index, float(label_smoothing), float(z_loss), float(softcap),
        reduction, wanted, chosen.target,
    )  # fmt: skip
    return loss.view(target.shape) if reduction == "none" else loss


def _check(
    name: str, values: Tensor, target: Tensor, smoothing: float, z_loss: float, softcap: float, reduction: str
) -> None:
    if values.ndim < 1 or not values.is_floating_point():
        raise ValueError(
            f"{name}: needs a float tensor with at least one dim, not {values.dtype} {tuple(values.shape)}"
        )
    whole = not (target.is_floating_point() or target.is_complex() or target.dtype == torch.bool)
    if not whole or target.shape != values.shape[:-1]:
        raise ValueError(
            f"{name}: target is {target.dtype} {tuple(target.shape)}; it must be integers of shape "
            f"{tuple(values.shape[:-1])}, one class index per row of {tuple(values.shape)}"
        )
    if target.device != values.device:
        raise ValueError(f"{name}: target is on {target.device} but the input is on {values.device}; move one of them")
    if reduction not in REDUCTIONS:
        raise ValueError(f"{name}: reduction is {reduction!r}; it must be one of {', '.join(REDUCTIONS)}")
    if not 0.0 <= smoothing <= 1.0:
        raise ValueError(f"{name}: label_smoothing is {smoothing}; it must be from 0 to 1")
    check_non_negative(name, "z_loss", z_loss)
    check_softcap(name, softcap)


def _indices(target: Tensor) -> Tensor:
    """int64 and int32 are taken as they are; narrower and unsigned types could not hold ignore_index."""
    return target if target.dtype in (torch.int64, torch.int32) else target.long()


def _check_linear(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> None:
    if weight.ndim != 2 or x.ndim < 1 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"linear_cross_entropy: weight is {tuple(weight.shape)} and x {tuple(x.shape)}; "
            f"weight must be (classes, {x.shape[-1] if x.ndim else '?'})"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"linear_cross_entropy: bias is {tuple(bias.shape)}; it must be ({weight.shape[0]},)")
    if weight.device != x.device or (bias is not None and bias.device != x.device):
        raise ValueError(f"linear_cross_entropy: weight is on {weight.device} but x is on {x.device}; move one of them")


def _row(target: Tensor) -> Tensor:
    """Targets one after the other, as the kernels read them."""
    flat = target if target.ndim == 1 else target.reshape(-1)
    return flat.contiguous()


def _flat(values: Tensor) -> Tensor:
    """[rows, last] with unit stride along the row; a view where the layout allows one."""
    flat = values if values.ndim == 2 else values.reshape(values.shape[:-1].numel(), values.shape[-1])
    return flat if flat.stride(-1) == 1 or flat.shape[-1] == 1 else flat.contiguous()


def _forward(
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: str,
    kernels: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, normalisers, count of targets that are not ignored)."""
    return resolve(kernels).forward(logits, target, Settings(ignore_index, smoothing, z_loss, softcap, reduction))


def _fake_forward(logits, target, ignore_index, smoothing, z_loss, softcap, reduction, kernels):
    rows = logits.new_empty(logits.shape[0], dtype=torch.float32)
    if reduction == "none":
        return rows, torch.empty_like(rows), logits.new_empty(0, dtype=torch.int32)
    return logits.new_empty((), dtype=torch.float32), rows, logits.new_empty((), dtype=torch.int32)


def _backward(
    upstream: Tensor,
    logits: Tensor,
    target: Tensor,
    normalisers: Tensor,
    count: Tensor,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: str,
    kernels: str,
) -> Tensor:
    settings = Settings(ignore_index, smoothing, z_loss, softcap, reduction)
    return resolve(kernels).backward(upstream, logits, target, normalisers, count, settings)


def _fake_backward(upstream, logits, *_):
    return logits.new_empty(logits.shape)


def _setup_context(ctx, inputs, output):
    logits, target, *settings = inputs
    _, normalisers, count = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(normalisers, count)
    ctx.save_for_backward(logits, target, normalisers, count)
    ctx.settings = settings


def _pull_back(ctx, upstream, *_):
    return _cross_entropy_backward(upstream, *ctx.saved_tensors, *ctx.settings), *[None] * 7


_cross_entropy_backward = KernelOp("cross_entropy_backward", _backward, _fake_backward)
_cross_entropy = KernelOp("cross_entropy", _forward, _fake_forward, setup_context=_setup_context, backward=_pull_back)


def _linear_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: str,
    wanted: list[bool],
    kernels: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, normalisers, dx, dweight, dbias); with "none" the gradients stay empty until backward."""
    settings = Settings(ignore_index, smoothing, z_loss, softcap, reduction)
    now = (False, False, False) if reduction == "none" else tuple(wanted)
    return resolve(kernels).forward(x, weight, bias, target, settings, now)


def _fake_linear_forward(x, weight, bias, target, ignore_index, smoothing, z_loss, softcap, reduction, wanted, kernels):
    rows = x.new_empty(x.shape[0], dtype=torch.float32)
    loss = torch.empty_like(rows) if reduction == "none" else x.new_empty((), dtype=torch.float32)
    now = [False, False, False] if reduction == "none" else wanted
    return loss, rows, *_empty_gradients(x, weight, bias, now)


def _empty_gradients(x, weight, bias, wanted):
    dx = x.new_empty(x.shape if wanted[0] else 0)
    dweight = weight.new_empty(weight.shape if wanted[1] else 0)
    dbias = x.new_empty(weight.shape[0] if wanted[2] else 0, dtype=x.dtype if bias is None else bias.dtype)
    return dx, dweight, dbias


def _linear_backward(
    upstream: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    normalisers: Tensor,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: str,
    wanted: list[bool],
    kernels: str,
) -> tuple[Tensor, Tensor, Tensor]:
    settings = Settings(ignore_index, smoothing, z_loss, softcap, reduction)
    return resolve(kernels).backward(upstream, x, weight, bias, target, normalisers, settings, tuple(wanted))


def _fake_linear_backward(upstream, x, weight, bias, target, normalisers, *settings):
    return _empty_gradients(x, weight, bias, settings[-2])


def _scaled(values: Tensor, factor: Tensor, kernels: str) -> Tensor:
    """values * factor, out of place."""
    return resolve(kernels).scaled(values, factor, False)


def _fake_scaled(values, factor, kernels):
    return torch.empty_like(values)


def _setup_linear(ctx, inputs, output):
    x, weight, bias, target, *settings = inputs
    _, normalisers, *gradients = output
    ctx.set_materialize_grads(False)  # else the gradients' own gradients would be made, as zeros
    ctx.mark_non_differentiable(normalisers, *gradients)
    ctx.settings = settings
    if ctx.settings[4] == "none":
        ctx.save_for_backward(x, weight, bias, target, normalisers)
    else:
        ctx.save_for_backward(*gradients)


def _pull_back_linear(ctx, upstream, *_):
    wanted, kernels = ctx.settings[-2:]
    if ctx.settings[4] == "none":
        gradients = _linear_backward_op(upstream, *ctx.saved_tensors, *ctx.settings)
    else:
        gradients = [_scaled_gradient(value, upstream, kernels) for value in ctx.saved_tensors]
    return *[value if want else None for value, want in zip(gradients, wanted)], *[None] * 8


def _scaled_gradient(values: Tensor, upstream: Tensor, kernels: str) -> Tensor:
    """In place where the graph is not kept: the buffer is ours, and it may be a gigabyte."""
    if traced(values) or torch._C._autograd._get_current_graph_task_keep_graph():
        return _scaled_op(values, upstream, kernels)
    return resolve(kernels).scaled(values, upstream, True)


_linear_backward_op = KernelOp("linear_cross_entropy_backward", _linear_backward, _fake_linear_backward)
_scaled_op = KernelOp("scaled", _scaled, _fake_scaled)
_linear = KernelOp(
    "linear_cross_entropy",
    _linear_forward,
    _fake_linear_forward,
    setup_context=_setup_linear,
    backward=_pull_back_linear,
)
