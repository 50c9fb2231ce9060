"""The reduction kernels as torch operators, with their gradients."""

import torch
from torch import Tensor

from flashkernel.core.library import Gradient, KernelOp
from flashkernel.core.op import resolve
from flashkernel.ops.reduce import kinds
from flashkernel.ops.reduce.masks import mask_rows


def _flat(x: Tensor) -> Tensor:
    """[rows, width] with unit stride along the row; a view where the layout allows one."""
    flat = x.reshape(-1, x.shape[-1]) if x.numel() else x.reshape(x.shape[:-1].numel(), x.shape[-1])
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def _forward(x: Tensor, weight: Tensor | None, kind: int, kernels: str) -> tuple[Tensor, Tensor]:
    """(y, saved): saved [rows], in float32, is what the backward of max and logsumexp needs; empty for the others."""
    y, saved = resolve(kernels).reduce(_flat(x), None if weight is None else weight.contiguous(), kind)
    return y.view(x.shape[:-1]), saved


def _fake_forward(x, weight, kind, kernels):
    rows = x.shape[:-1].numel()
    kept = rows if kind in (kinds.MAX, kinds.LOGSUMEXP) else 0
    return x.new_empty(x.shape[:-1]), x.new_empty(kept, dtype=torch.float32)


def _setup_context(ctx, inputs, output):
    x, weight, kind, kernels = inputs
    y, saved = output
    ctx.shape, ctx.kind, ctx.kernels = x.shape, kind, kernels
    if kind == kinds.WEIGHTED:
        ctx.save_for_backward(x, weight)
    elif kind in (kinds.MAX, kinds.LOGSUMEXP):
        ctx.save_for_backward(x, y, saved)


def _pull_back(ctx, wanted, dy, _dsaved):
    saved = ctx.saved_tensors
    if ctx.kind == kinds.SUM:
        return dy.unsqueeze(-1).expand(ctx.shape), None  # a view: nothing is written, as in torch
    if ctx.kind == kinds.MEAN:
        return (dy / ctx.shape[-1]).unsqueeze(-1).expand(ctx.shape), None
    if ctx.kind == kinds.WEIGHTED:
        return weighted_sum_backward(dy, *saved, *wanted, ctx.kernels)
    return reduce_backward(dy, *saved, ctx.kind, ctx.kernels), None


def _backward(dy: Tensor, x: Tensor, y: Tensor, saved: Tensor, kind: int, kernels: str) -> Tensor:
    """dx of max or logsumexp."""
    dx = resolve(kernels).reduce_backward(dy.reshape(-1).contiguous(), _flat(x), y.reshape(-1), saved, kind)
    return dx.view(x.shape)


def _fake_backward(dy, x, y, saved, kind, kernels):
    return x.new_empty(x.shape)


def _weighted_pull(
    dy: Tensor, x: Tensor, weight: Tensor, want_x: bool, want_weight: bool, kernels: str
) -> tuple[Tensor, Tensor]:
    """(dx, dweight); the one not wanted is empty."""
    flat = dy.reshape(-1).contiguous()
    dx, dweight = resolve(kernels).weighted_backward(flat, _flat(x), weight.contiguous(), want_x, want_weight)
    return dx.view(x.shape) if want_x else dx, dweight


def _fake_weighted_pull(dy, x, weight, want_x, want_weight, kernels):
    return x.new_empty(x.shape if want_x else 0), weight.new_empty(weight.shape if want_weight else 0)


def _softmax_forward(x: Tensor, mask: Tensor | None, scale: float, causal: bool, kernels: str) -> Tensor:
    queries = x.shape[-2] if causal else 0
    return resolve(kernels).softmax(_flat(x), mask_rows(mask, x.shape), scale, queries).view(x.shape)


def _fake_softmax(x, mask, scale, causal, kernels):
    return x.new_empty(x.shape)


def _argmax_forward(x: Tensor, invalid: int | None) -> Tensor:
    return resolve("flashkernel.ops.reduce.triton.argmax:argmax")(_flat(x), invalid).view(x.shape[:-1])


def _fake_argmax(x, invalid):
    return x.new_empty(x.shape[:-1], dtype=torch.int64)


def _setup_softmax(ctx, inputs, output):
    x, _, scale, causal, kernels = inputs
    ctx.save_for_backward(output)
    ctx.settings = (scale, x.shape[-2] if causal else 0, kernels)


def _pull_back_softmax(ctx, wanted, dy):
    return (softmax_backward(dy, *ctx.saved_tensors, *ctx.settings),)


def _softmax_pull(dy: Tensor, y: Tensor, scale: float, queries: int, kernels: str) -> Tensor:
    """dx of the softmax y; queries > 0 says causal."""
    return resolve(kernels).softmax_backward(_flat(dy), _flat(y), scale, queries).view(y.shape)


def _fake_softmax_pull(dy, y, scale, queries, kernels):
    return y.new_empty(y.shape)


argmax = KernelOp("argmax", _argmax_forward, _fake_argmax)
reduce_backward = KernelOp("reduce_backward", _backward, _fake_backward)
weighted_sum_backward = KernelOp("weighted_sum_backward", _weighted_pull, _fake_weighted_pull)
reduce = KernelOp("reduce", _forward, _fake_forward, Gradient(_setup_context, _pull_back, ("x", "weight")))
softmax_backward = KernelOp("softmax_backward", _softmax_pull, _fake_softmax_pull)
softmax = KernelOp("softmax", _softmax_forward, _fake_softmax, Gradient(_setup_softmax, _pull_back_softmax, ("x",)))
