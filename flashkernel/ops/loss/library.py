"""The loss kernels as torch operators, with their gradients."""

import torch
from torch import Tensor

from flashkernel.core.library import KernelOp, traced
from flashkernel.core.op import resolve
from flashkernel.ops.loss.params import LinearLossInputs, LossParams


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
    """(loss, lse, count of targets that are not ignored)."""
    return resolve(kernels).forward(logits, target, LossParams(ignore_index, smoothing, z_loss, softcap, reduction))


def _fake_forward(logits, target, ignore_index, smoothing, z_loss, softcap, reduction, kernels):
    rows = logits.new_empty(logits.shape[0], dtype=torch.float32)
    if reduction == "none":
        return rows, torch.empty_like(rows), logits.new_empty(0, dtype=torch.int32)
    return logits.new_empty((), dtype=torch.float32), rows, logits.new_empty((), dtype=torch.int32)


def _backward(
    dloss: Tensor,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    count: Tensor,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: str,
    kernels: str,
) -> Tensor:
    params = LossParams(ignore_index, smoothing, z_loss, softcap, reduction)
    return resolve(kernels).backward(dloss, logits, target, lse, count, params)


def _fake_backward(dloss, logits, *_):
    return logits.new_empty(logits.shape)


def _setup_context(ctx, inputs, output):
    logits, target, *params = inputs
    _, lse, count = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(lse, count)
    ctx.save_for_backward(logits, target, lse, count)
    ctx.params = params


def _pull_back(ctx, dloss, *_):
    return cross_entropy_backward(dloss, *ctx.saved_tensors, *ctx.params), *[None] * 7


cross_entropy_backward = KernelOp("cross_entropy_backward", _backward, _fake_backward)
cross_entropy = KernelOp("cross_entropy", _forward, _fake_forward, setup_context=_setup_context, backward=_pull_back)


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
    """(loss, lse, dx, dweight, dbias); with "none" the gradients stay empty until backward."""
    params = LossParams(ignore_index, smoothing, z_loss, softcap, reduction)
    now = (False, False, False) if reduction == "none" else tuple(wanted)
    return resolve(kernels).forward(LinearLossInputs(x, weight, bias, target), params, now)


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
    dloss: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    lse: Tensor,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: str,
    wanted: list[bool],
    kernels: str,
) -> tuple[Tensor, Tensor, Tensor]:
    params = LossParams(ignore_index, smoothing, z_loss, softcap, reduction)
    inputs = LinearLossInputs(x, weight, bias, target)
    return resolve(kernels).backward(dloss, inputs, lse, params, tuple(wanted))


def _fake_linear_backward(dloss, x, weight, bias, target, lse, *params):
    return _empty_gradients(x, weight, bias, params[-2])


def _scaled(values: Tensor, factor: Tensor, kernels: str) -> Tensor:
    """values * factor, out of place."""
    return resolve(kernels).scaled(values, factor, False)


def _fake_scaled(values, factor, kernels):
    return torch.empty_like(values)


def _setup_linear(ctx, inputs, output):
    x, weight, bias, target, *params = inputs
    _, lse, *gradients = output
    ctx.set_materialize_grads(False)  # else the gradients' own gradients would be made, as zeros
    ctx.mark_non_differentiable(lse, *gradients)
    ctx.params = params
    if ctx.params[4] == "none":
        ctx.save_for_backward(x, weight, bias, target, lse)
    else:
        ctx.save_for_backward(*gradients)


def _pull_back_linear(ctx, dloss, *_):
    wanted, kernels = ctx.params[-2:]
    if ctx.params[4] == "none":
        gradients = linear_cross_entropy_backward(dloss, *ctx.saved_tensors, *ctx.params)
    else:
        gradients = [_scaled_gradient(value, dloss, kernels) for value in ctx.saved_tensors]
    return *[value if want else None for value, want in zip(gradients, wanted)], *[None] * 8


def _scaled_gradient(values: Tensor, dloss: Tensor, kernels: str) -> Tensor:
    """In place where the graph is not kept: the buffer is ours, and it may be a gigabyte."""
    if traced(values) or torch._C._autograd._get_current_graph_task_keep_graph():
        return scaled(values, dloss, kernels)
    return resolve(kernels).scaled(values, dloss, True)


linear_cross_entropy_backward = KernelOp("linear_cross_entropy_backward", _linear_backward, _fake_linear_backward)
scaled = KernelOp("scaled", _scaled, _fake_scaled)
linear_cross_entropy = KernelOp(
    "linear_cross_entropy",
    _linear_forward,
    _fake_linear_forward,
    setup_context=_setup_linear,
    backward=_pull_back_linear,
)
