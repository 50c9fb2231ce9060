"""The matrix products' kernels as torch operators, with their gradients.

The gradients are products of the same kernels: dA = dZ B^T, dB = A^T dZ, where dZ is the gradient of what goes into the
activation and the transposes are views. A product that ends in an activation stores its input Z for the backward pass.
"""

import torch
from torch import Tensor

from flashkernel.blocks.epilogue import Epilogue
from flashkernel.core.library import KernelOp
from flashkernel.core.op import resolve
from flashkernel.ops.matmul.params import MatmulParams

_GRADIENTS = "flashkernel.ops.matmul.triton:activation_gradient"  # elementwise: of all kernel modules


def matmul(
    kernels: str,
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    chain: str,
    scaling: str,
    out_dtype: torch.dtype,
    tf32: bool,
    save: bool,
) -> Tensor:
    """C [M, N], or [batch, M, N] if an operand has a batch; differentiable in a, b, bias and residual.

    `save` stores the activation's input for the backward pass.
    """
    alone = a.ndim == 2 and b.ndim == 2
    c, _ = _matmul(
        _batched(a), _batched(b), bias, _batched(residual), _batched(a_scale), _batched(b_scale),
        chain, scaling, out_dtype, tf32, save, kernels,
    )  # fmt: skip
    return c[0] if alone else c


def _batched(x):
    return x[None] if x is not None and x.ndim == 2 else x


def _batches(a: Tensor, b: Tensor) -> int:
    return b.shape[0] if a.shape[0] == 1 else a.shape[0]


def _forward(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    chain: str,
    scaling: str,
    out_dtype: torch.dtype,
    tf32: bool,
    save: bool,
    kernels: str,
) -> tuple[Tensor, Tensor]:
    shape = (_batches(a, b), a.shape[1], b.shape[2])
    preactivation = torch.empty(shape, dtype=a.dtype, device=a.device) if save else None
    params = MatmulParams(out_dtype, chain, scaling, tf32)
    merged = _merged_batch(a, b, residual, scaling)
    if merged is not None:  # one product of batch * M rows
        flat = None if preactivation is None else preactivation.view(1, -1, shape[2])
        c = resolve(kernels).forward(merged[0], b, params, bias, merged[1], a_scale, b_scale, flat).view(shape)
    else:
        c = resolve(kernels).forward(a, b, params, bias, residual, a_scale, b_scale, preactivation)
    return c, a.new_empty(0) if preactivation is None else preactivation


def _merged_batch(a: Tensor, b: Tensor, residual: Tensor | None, scaling: str) -> tuple[Tensor, Tensor | None] | None:
    """A and the residual with the batch as more rows, if B is the same for all and the strides allow views."""
    batches, m, k = a.shape
    if batches == 1 or b.shape[0] != 1 or scaling or a.stride(0) != m * a.stride(1) or not a.numel():
        return None
    if residual is None:
        return a.as_strided((1, batches * m, k), (0, a.stride(1), a.stride(2))), None
    if residual.shape[0] == 1 or residual.stride(0) != m * residual.stride(1):
        return None
    return (
        a.as_strided((1, batches * m, k), (0, a.stride(1), a.stride(2))),
        residual.as_strided((1, batches * m, residual.shape[2]), (0, residual.stride(1), residual.stride(2))),
    )


def _fake_forward(a, b, bias, residual, a_scale, b_scale, chain, scaling, out_dtype, tf32, save, kernels):
    shape = (_batches(a, b), a.shape[1], b.shape[2])
    return a.new_empty(shape, dtype=out_dtype), a.new_empty(shape if save else 0)


def _backward(
    dc: Tensor,
    a: Tensor,
    b: Tensor,
    preactivation: Tensor,
    bias_dtype: torch.dtype,
    residual_dtype: torch.dtype,
    residual_batches: int,
    chain: str,
    tf32: bool,
    wanted: list[bool],
    kernels: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of a, b, the bias and the residual; those not wanted are empty."""
    epilogue, product = Epilogue.parse(chain), resolve(kernels).forward
    if not epilogue.linear:
        dz = resolve(_GRADIENTS)(dc, preactivation, epilogue)
    else:
        dz = dc if epilogue.factor == 1.0 else dc * epilogue.factor
        dz = dz.to(a.dtype)
        dz = dz if dz.stride(2) == 1 or dz.stride(1) == 1 else dz.contiguous()
    nothing = (None, None, None, None, None)
    results = [a.new_empty(0) for _ in range(4)]  # an output of its own each
    params = MatmulParams(a.dtype, "", "", tf32)
    if wanted[0]:
        if a.shape[0] < dz.shape[0]:  # one A for all: dA is the sum over the batch
            da = product(dz, b.transpose(1, 2), MatmulParams(torch.float32, "", "", tf32), *nothing)
            results[0] = da.sum(0, keepdim=True).to(a.dtype)
        else:
            results[0] = product(dz, b.transpose(1, 2), params, *nothing)
    if wanted[1]:
        if b.shape[0] < dz.shape[0]:  # one B for all: the sum over M goes on over the batch
            rows = dz.shape[0] * dz.shape[1]
            results[1] = product(a.reshape(1, rows, -1).transpose(1, 2), dz.reshape(1, rows, -1), params, *nothing)
        else:
            results[1] = product(a.transpose(1, 2), dz, params, *nothing)
    if wanted[2]:
        results[2] = dz.sum((0, 1), dtype=torch.float32).to(bias_dtype)
    if wanted[3]:
        over = dc.sum(0, keepdim=True, dtype=torch.float32) if residual_batches < dc.shape[0] else dc
        results[3] = over.to(residual_dtype, copy=True)
    return results[0], results[1], results[2], results[3]


def _fake_backward(dc, a, b, preactivation, bias_dtype, residual_dtype, residual_batches, chain, tf32, wanted, kernels):
    return (
        a.new_empty(a.shape if wanted[0] else 0),
        a.new_empty(b.shape if wanted[1] else 0),
        a.new_empty(dc.shape[2], dtype=bias_dtype) if wanted[2] else a.new_empty(0),
        a.new_empty((residual_batches, *dc.shape[1:]), dtype=residual_dtype) if wanted[3] else a.new_empty(0),
    )


def _setup_context(ctx, inputs, output):
    a, b, bias, residual, _, _, chain, _, _, tf32, _, kernels = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(a, b, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.settings = (
        a.dtype if bias is None else bias.dtype, a.dtype if residual is None else residual.dtype,
        1 if residual is None else residual.shape[0], chain, tf32,
    )  # fmt: skip
    ctx.kernels = kernels


def _pull_back(ctx, dc, _):
    if dc is None:
        return (None,) * 12
    wanted = list(ctx.needs_input_grad[:4])
    results = _matmul_backward(dc, *ctx.saved_tensors, *ctx.settings, wanted, ctx.kernels)
    return *[result if want else None for result, want in zip(results, wanted)], *[None] * 8


_matmul_backward = KernelOp("matmul_backward", _backward, _fake_backward)
_matmul = KernelOp("matmul", _forward, _fake_forward, setup_context=_setup_context, backward=_pull_back)
