"""The loss kernels as torch operators, with their gradients."""

import torch
from torch import Tensor

from flashkernel.core.library import Gradient, KernelOp
from flashkernel.core.op import resolve
from flashkernel.ops.loss.params import LinearLossInputs, LossParams


def _forward(logits: Tensor, target: Tensor, params: LossParams, kernels: str) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, lse, count of targets that are not ignored)."""
    return resolve(kernels).forward(logits, target, params)


def _fake_forward(logits, target, params, kernels):
    rows = logits.new_empty(logits.shape[0], dtype=torch.float32)
    if params.reduction == "none":
        return rows, torch.empty_like(rows), logits.new_empty(0, dtype=torch.int32)
    return logits.new_empty((), dtype=torch.float32), rows, logits.new_empty((), dtype=torch.int32)


def _backward(
    dloss: Tensor, logits: Tensor, target: Tensor, lse: Tensor, count: Tensor, params: LossParams, kernels: str
) -> Tensor:
    return resolve(kernels).backward(dloss, logits, target, lse, count, params)


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, lse, dx, dweight, dbias); with "none" the gradients stay empty until backward."""
    now = (False, False, False) if params.reduction == "none" else tuple(wanted)
    return resolve(kernels).forward(inputs, params, now)


def _fake_linear_forward(inputs, params, wanted, kernels):
    rows = inputs.x.new_empty(inputs.x.shape[0], dtype=torch.float32)
    if params.reduction == "none":
        return torch.empty_like(rows), rows, *_empty_gradients(inputs, [False, False, False])
    return inputs.x.new_empty((), dtype=torch.float32), rows, *_empty_gradients(inputs, wanted)


def _empty_gradients(inputs, wanted):
    x, weight, bias, _ = inputs
    dx = x.new_empty(x.shape if wanted[0] else 0)
    dweight = weight.new_empty(weight.shape if wanted[1] else 0)
    dbias = x.new_empty(weight.shape[0] if wanted[2] else 0, dtype=x.dtype if bias is None else bias.dtype)
    return dx, dweight, dbias


def _linear_backward(
    dloss: Tensor, inputs: LinearLossInputs, lse: Tensor, params: LossParams, wanted: list[bool], kernels: str
) -> tuple[Tensor, Tensor, Tensor]:
    return resolve(kernels).backward(dloss, inputs, lse, params, tuple(wanted))


def _fake_linear_backward(dloss, inputs, lse, params, wanted, kernels):
    return _empty_gradients(inputs, wanted)


def _scaled(values: Tensor, factor: Tensor, kernels: str) -> Tensor:
    """values * factor, out of place."""
    return resolve(kernels).scaled(values, factor, False)


def _fake_scaled(values, factor, kernels):
    return torch.empty_like(values)


def _setup_linear(ctx, inputs, output):
    given, ctx.params, _, ctx.kernels = inputs
    _, lse, *gradients = output
    ctx.mark_non_differentiable(lse, *gradients)
    ctx.save_for_backward(*((*given, lse) if ctx.params.reduction == "none" else gradients))


def _pull_back_linear(ctx, wanted, dloss, *_):
    saved = ctx.saved_tensors
    if ctx.params.reduction == "none":
        *given, lse = saved
        return linear_cross_entropy_backward(dloss, LinearLossInputs(*given), lse, ctx.params, wanted, ctx.kernels)
    # In place where it is allowed: the buffer is ours, and it may be a gigabyte.
    in_place = linear_cross_entropy.may_overwrite(ctx, dloss)
    function = resolve(ctx.kernels).scaled
    return [
        None if not want else function(value, dloss, True) if in_place else scaled(value, dloss, ctx.kernels)
        for value, want in zip(saved, wanted)
    ]


linear_cross_entropy_backward = KernelOp("linear_cross_entropy_backward", _linear_backward, _fake_linear_backward)
scaled = KernelOp("scaled", _scaled, _fake_scaled)
linear_cross_entropy = KernelOp(
    "linear_cross_entropy",
    _linear_forward,
    _fake_linear_forward,
    Gradient(_setup_linear, _pull_back_linear, ("x", "weight", "bias")),
)
