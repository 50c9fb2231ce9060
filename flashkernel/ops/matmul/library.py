"""The matrix products' kernels as torch operators, with their gradients.

The gradients are products of the same kernels: dA = dZ B^T, dB = A^T dZ, where dZ is the gradient of what goes into the
activation and the transposes are views. A product that ends in an activation stores its input Z for the backward pass.
"""

import torch
from torch import Tensor

from flashkernel.blocks.epilogue import Epilogue
from flashkernel.core.arguments import unit_stride
from flashkernel.core.library import KernelOp
from flashkernel.core.op import resolve
from flashkernel.ops.matmul.params import GroupedParams, MatmulParams

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


def grouped_matmul(
    kernels: str,
    x: Tensor,
    weights: Tensor,
    offsets: Tensor,
    gather: Tensor | None,
    scatter: Tensor | None,
    row_weights: Tensor | None,
    bias: Tensor | None,
    out_rows: int,
    out_dtype: torch.dtype,
    tf32: bool,
) -> Tensor:
    """y [out_rows, N]; differentiable in x, the weights, the row weights and the bias."""
    return _grouped(x, weights, row_weights, bias, offsets, gather, scatter, out_rows, out_dtype, tf32, kernels)


def _index(index: Tensor | None) -> Tensor | None:
    return None if index is None else index.to(torch.int32).contiguous()


def _grouped_forward(
    x: Tensor,
    weights: Tensor,
    row_weights: Tensor | None,
    bias: Tensor | None,
    offsets: Tensor,
    gather: Tensor | None,
    scatter: Tensor | None,
    out_rows: int,
    out_dtype: torch.dtype,
    tf32: bool,
    kernels: str,
) -> Tensor:
    weighting = None if row_weights is None else row_weights.to(torch.float32).contiguous()
    return resolve(kernels).grouped_forward(
        x, weights, _index(offsets), GroupedParams(out_dtype, out_rows, tf32), _index(gather), _index(scatter),
        weighting, bias,
    )  # fmt: skip


def _fake_grouped_forward(x, weights, row_weights, bias, offsets, gather, scatter, out_rows, out_dtype, tf32, kernels):
    return x.new_empty((out_rows, weights.shape[2]), dtype=out_dtype)


def _grouped_backward(
    dy: Tensor,
    x: Tensor,
    weights: Tensor,
    row_weights: Tensor | None,
    bias: Tensor | None,
    offsets: Tensor,
    gather: Tensor | None,
    scatter: Tensor | None,
    tf32: bool,
    wanted: list[bool],
    kernels: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, the weights, the row weights and the bias; those not wanted are empty.

    The row weights' gradient is <x[r], u[r]> + <dy[r], bias> with u = dy W^T, which is dx without its row weights: no
    product is computed again.
    """
    module, results = resolve(kernels), [x.new_empty(0) for _ in range(4)]
    offsets, gather, scatter = _index(offsets), _index(gather), _index(scatter)  # type: ignore[assignment]
    weighting = None if row_weights is None else row_weights.to(torch.float32).contiguous()
    rows = next((index.shape[0] for index in (gather, scatter) if index is not None), x.shape[0])
    dy = unit_stride(dy.to(x.dtype))
    if wanted[0] or wanted[2]:
        # Repeated rows of x are added in float32, and the row weights' gradient is a sum of products with u.
        wide = x.dtype if gather is None and not wanted[2] else torch.float32
        after = wanted[2]  # u first, its row weights later
        u = module.grouped_forward(
            dy, weights.transpose(1, 2), offsets, GroupedParams(wide, rows, tf32), scatter, None,
            None if after else weighting, None,
        )  # fmt: skip
        if wanted[2]:
            results[2] = _row_weight_gradient(u, x, dy, bias, offsets, gather, scatter).to(row_weights.dtype)  # type: ignore[union-attr]
        if wanted[0]:
            dx = u * weighting[:, None] if after and weighting is not None else u
            if gather is not None:
                dx = torch.zeros(x.shape, dtype=wide, device=x.device).index_put_((gather,), dx, accumulate=True)
            results[0] = dx.to(x.dtype)
    if wanted[1]:
        params = GroupedParams(weights.dtype, 0, tf32)
        results[1] = module.grouped_weight_gradient(x, dy, offsets, params, gather, scatter, weighting)
    if wanted[3] and bias is not None:
        # A product with ones: the sum over each group's rows. Tensor cores want a few columns.
        ones = torch.ones((rows, 1), dtype=x.dtype, device=x.device)
        params = GroupedParams(torch.float32, 0, tf32)
        summed = module.grouped_weight_gradient(ones, dy, offsets, params, None, scatter, weighting)
        results[3] = summed[:, 0].to(bias.dtype, copy=True)
    return results[0], results[1], results[2], results[3]


def _row_weight_gradient(
    u: Tensor,
    x: Tensor,
    dy: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    gather: Tensor | None,
    scatter: Tensor | None,
) -> Tensor:
    """[rows] in float32; zero for rows of no group, where u is."""
    given = x if gather is None else x.index_select(0, gather)
    found = (given.float() * u).sum(1)
    if bias is None:
        return found
    row = torch.arange(u.shape[0], dtype=torch.int32, device=u.device)
    group = torch.searchsorted(offsets[1:], row, right=True)
    padded = torch.cat([bias.float(), bias.new_zeros((1, bias.shape[1]), dtype=torch.float32)])
    out = dy if scatter is None else dy.index_select(0, scatter)
    return found + (padded.index_select(0, group) * out.float()).sum(1)


def _fake_grouped_backward(dy, x, weights, row_weights, bias, offsets, gather, scatter, tf32, wanted, kernels):
    given = (x, weights, row_weights, bias)
    return tuple(tensor.new_empty(tensor.shape) if want else x.new_empty(0) for tensor, want in zip(given, wanted))


def _setup_grouped(ctx, inputs, output):
    x, weights, row_weights, bias, offsets, gather, scatter, _, _, tf32, kernels = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weights, row_weights, bias, offsets, gather, scatter)
    ctx.settings = (tf32, kernels)


def _pull_back_grouped(ctx, dy):
    if dy is None:
        return (None,) * 11
    wanted, (tf32, kernels) = list(ctx.needs_input_grad[:4]), ctx.settings
    results = _grouped_matmul_backward(dy, *ctx.saved_tensors, tf32, wanted, kernels)
    return *[result if want else None for result, want in zip(results, wanted)], *[None] * 7


_grouped_matmul_backward = KernelOp("grouped_matmul_backward", _grouped_backward, _fake_grouped_backward)
_grouped = KernelOp(
    "grouped_matmul", _grouped_forward, _fake_grouped_forward, setup_context=_setup_grouped, backward=_pull_back_grouped
)
