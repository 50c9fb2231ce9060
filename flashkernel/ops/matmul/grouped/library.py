"""The grouped products' kernels as torch operators, with their gradients, which are grouped products as well."""

import torch
from torch import Tensor

from flashkernel.core.arguments import unit_stride
from flashkernel.core.library import KernelOp
from flashkernel.core.op import resolve
from flashkernel.ops.matmul.grouped.params import GroupedParams


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
