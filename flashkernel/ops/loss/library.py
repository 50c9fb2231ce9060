"""The loss kernels as torch operators, with their gradients."""

import torch
from torch import Tensor

from flashkernel.core.arguments import as_rows
from flashkernel.core.library import Gradient, KernelOp
from flashkernel.core.op import resolve
from flashkernel.ops.loss.params import LinearLossInputs, LossParams


def _row(target: Tensor) -> Tensor:
    """Targets one after the other, as the kernels read them."""
    return target.reshape(-1).contiguous()


def _forward(logits: Tensor, target: Tensor, params: LossParams, kernels: str) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, lse, count of targets that are not ignored) of logits (..., classes); the lse are by rows."""
    loss, lse, count = resolve(kernels).forward(as_rows(logits), _row(target), params)
    return _shaped(loss, target, params), lse, count


def _shaped(loss: Tensor, target: Tensor, params: LossParams) -> Tensor:
    """Losses of rows in the shape of their targets."""
    return loss.view(target.shape) if params.reduction == "none" else loss


def _fake_forward(logits, target, params, kernels):
    return _fake_losses(logits, target, params)


def _fake_losses(x, target, params):
    lse = x.new_empty(target.numel(), dtype=torch.float32)
    shapes = (target.shape, (0,)) if params.reduction == "none" else ((), ())
    return x.new_empty(shapes[0], dtype=torch.float32), lse, x.new_empty(shapes[1], dtype=torch.int32)


def _backward(
    dloss: Tensor, logits: Tensor, target: Tensor, lse: Tensor, count: Tensor, params: LossParams, kernels: str
) -> Tensor:
    dloss = dloss.reshape(-1) if params.reduction == "none" else dloss
    dlogits = resolve(kernels).backward(dloss, as_rows(logits), _row(target), lse, count, params)
    return dlogits.view(logits.shape)


def _fake_backward(dloss, logits, *_):
    return logits.new_empty(logits.shape)


def _setup_context(ctx, inputs, output):
    logits, target, *ctx.settings = inputs
    _, lse, count = output
    ctx.mark_non_differentiable(lse, count)
    ctx.save_for_backward(logits, target, lse, count)


def _pull_back(ctx, wanted, dloss, *_):
    return (cross_entropy_backward(dloss, *ctx.saved_tensors, *ctx.settings),)


cross_entropy_backward = KernelOp("cross_entropy_backward", _backward, _fake_backward)
cross_entropy = KernelOp("cross_entropy", _forward, _fake_forward, Gradient(_setup_context, _pull_back, ("logits",)))


def _linear_forward(
    inputs: LinearLossInputs, params: LossParams, wanted: list[bool], kernels: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, lse, count, dx, dweight, dbias); with "none" the gradients stay empty until backward."""
    now = (False, False, False) if params.reduction == "none" else tuple(wanted)
    loss, lse, count, dx, *others = resolve(kernels).forward(_by_rows(inputs), params, now)
    return _shaped(loss, inputs.target, params), lse, count, _shaped_as(dx, inputs.x, now[0]), *others


def _by_rows(inputs: LinearLossInputs) -> LinearLossInputs:
    return inputs._replace(x=as_rows(inputs.x), target=_row(inputs.target))


def _shaped_as(dx: Tensor, x: Tensor, wanted: bool) -> Tensor:
    return dx.view(x.shape) if wanted else dx


def _fake_linear_forward(inputs, params, wanted, kernels):
    now = [False, False, False] if params.reduction == "none" else wanted
    return *_fake_losses(inputs.x, inputs.target, params), *_empty_gradients(inputs, now)


def _empty_gradients(inputs, wanted):
    x, weight, bias, _ = inputs
    dx = x.new_empty(x.shape if wanted[0] else 0)
    dweight = weight.new_empty(weight.shape if wanted[1] else 0)
    dbias = x.new_empty(weight.shape[0] if wanted[2] else 0, dtype=x.dtype if bias is None else bias.dtype)
    return dx, dweight, dbias


def _linear_backward(
    dloss: Tensor, inputs: LinearLossInputs, lse: Tensor, params: LossParams, wanted: list[bool], kernels: str
) -> tuple[Tensor, Tensor, Tensor]:
    dx, *others = resolve(kernels).backward(dloss.reshape(-1), _by_rows(inputs), lse, params, tuple(wanted))
    return _shaped_as(dx, inputs.x, wanted[0]), *others


def _fake_linear_backward(dloss, inputs, lse, params, wanted, kernels):
    return _empty_gradients(inputs, wanted)


def _scaled(values: Tensor, factor: Tensor, count: Tensor | None, summed: bool, kernels: str) -> Tensor:
    """The gradient for a loss gradient `factor` from the stored one, out of place."""
    return resolve(kernels).scaled(values, factor, count, summed, False)


def _fake_scaled(values, factor, count, summed, kernels):
    return torch.empty_like(values)


def _setup_linear(ctx, inputs, output):
    given, ctx.params, _, ctx.kernels = inputs
    _, lse, count, *gradients = output
    ctx.mark_non_differentiable(lse, count, *gradients)
    ctx.save_for_backward(*((*given, lse) if ctx.params.reduction == "none" else (count, *gradients)))


def _pull_back_linear(ctx, wanted, dloss, *_):
    saved = ctx.saved_tensors
    if ctx.params.reduction == "none":
        *given, lse = saved
        return linear_cross_entropy_backward(dloss, LinearLossInputs(*given), lse, ctx.params, wanted, ctx.kernels)
    count, *gradients = saved
    # In place where it is allowed: the buffer is ours, and it may be a gigabyte.
    in_place = linear_cross_entropy.may_overwrite(ctx, dloss)
    function, summed = resolve(ctx.kernels).scaled, ctx.params.reduction == "sum"
    by = count if ctx.params.stored_scale(gradients[0].dtype) > 1.0 else None
    results: list[Tensor | None] = []
    for value, want in zip(gradients, wanted):
        if not want:
            results.append(None)
        elif in_place:
            results.append(function(value, dloss, by, summed, True))
        else:
            results.append(scaled(value, dloss, by, summed, ctx.kernels))
    return results


linear_cross_entropy_backward = KernelOp("linear_cross_entropy_backward", _linear_backward, _fake_linear_backward)
scaled = KernelOp("scaled", _scaled, _fake_scaled)
linear_cross_entropy = KernelOp(
    "linear_cross_entropy",
    _linear_forward,
    _fake_linear_forward,
    Gradient(_setup_linear, _pull_back_linear, ("x", "weight", "bias")),
)
