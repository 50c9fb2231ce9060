"""The norm kernels as torch operators, with their gradients."""

import torch
from torch import Tensor

from flashkernel.core.arguments import as_rows
from flashkernel.core.library import Gradient, KernelOp
from flashkernel.core.op import resolve


def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    offset: float,
    rms: bool,
    kernels: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, total, mean, rstd); total is empty without a residual."""
    flat_residual = None if residual is None else as_rows(residual)
    vectors = [None if vector is None else vector.contiguous() for vector in (weight, bias)]
    return resolve(kernels).forward(as_rows(x), *vectors, flat_residual, eps, offset, rms, x.shape)


def _fake_forward(x, weight, bias, residual, eps, offset, rms, kernels):
    rows = x.shape[:-1].numel()
    y = x.new_empty(x.shape)
    total = x.new_empty(0 if residual is None else x.shape)
    mean = x.new_empty(0 if rms else rows, dtype=torch.float32)
    return y, total, mean, x.new_empty(rows, dtype=torch.float32)


def _backward(
    dy: Tensor,
    dtotal: Tensor | None,
    total: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    bias: Tensor | None,
    offset: float,
    rms: bool,
    kernels: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias); a gradient without its parameter is empty."""
    flat_dtotal = None if dtotal is None else as_rows(dtotal)
    bias_dtype = None if bias is None else bias.dtype
    weight = None if weight is None else weight.contiguous()
    dx, dweight, dbias = resolve(kernels).backward(
        as_rows(dy), flat_dtotal, as_rows(total), weight, mean, rstd, bias_dtype, offset, rms
    )
    return dx.view(dy.shape), dweight, dbias


def _fake_backward(dy, dtotal, total, weight, mean, rstd, bias, offset, rms, kernels):
    nothing = dy.new_empty(0, dtype=torch.float32)
    dweight = nothing if weight is None else weight.new_empty(weight.shape)
    dbias = nothing.clone() if bias is None else bias.new_empty(bias.shape)
    return total.new_empty(dy.shape), dweight, dbias


def _setup_context(ctx, inputs, output):
    x, weight, bias, residual, _, offset, rms, kernels = inputs
    _, total, mean, rstd = output
    ctx.save_for_backward(x if residual is None else total, weight, bias, mean, rstd)
    ctx.settings = (offset, rms, kernels)
    ctx.has_residual = residual is not None


def _pull_back(ctx, wanted, dy, dtotal, _dmean, _drstd):
    total, weight, bias, mean, rstd = ctx.saved_tensors
    if not ctx.has_residual:
        dtotal = None  # the empty placeholder's gradient
    if dy is None:
        dy = torch.zeros_like(total)
    dx, dweight, dbias = norm_backward(dy, dtotal, total, weight, mean, rstd, bias, *ctx.settings)
    return dx, dweight, dbias, dx


norm_backward = KernelOp("norm_backward", _backward, _fake_backward)
norm = KernelOp(
    "norm", _forward, _fake_forward, Gradient(_setup_context, _pull_back, ("x", "weight", "bias", "residual"))
)
