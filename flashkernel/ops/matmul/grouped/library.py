"""The grouped products' kernels as torch operators, with their gradients.

With z[r] = x[gather[r]] W[g] + bias[g] and y[scatter[r]] = row_weights[r] activation(z[r]), the backward pass computes
dz by rows of the groups (gradients.py), and from it two grouped products: dx = dz W^T and dW[g] = X_g^T dz_g. The
forward pass stores z where an activation or the row weights' gradient needs it.
"""

import torch
from torch import Tensor

from flashkernel.core.arguments import unit_stride
from flashkernel.core.library import KernelOp
from flashkernel.core.op import resolve
from flashkernel.ops.matmul.grouped.params import GroupedParams, GroupedTensors

_GRADIENTS = "flashkernel.ops.matmul.grouped.gradients"  # of all kernel modules


def grouped_matmul(
    kernels: str,
    x: Tensor,
    weights: Tensor,
    offsets: Tensor,
    tensors: GroupedTensors,
    params: GroupedParams,
    save: bool,
) -> tuple[Tensor, Tensor]:
    """(y [out_rows, columns], z); y is differentiable in x, the weights, the row weights and the bias.

    `save` stores z [rows, N], for the backward pass or the caller; without it z is empty.
    """
    return _grouped(
        x, weights, tensors.row_weights, tensors.bias, offsets, tensors.gather, tensors.scatter, tensors.x_scale,
        tensors.weight_scale, params.out_rows, params.out_dtype, params.tf32, params.activation, params.packed, save,
        kernels,
    )  # fmt: skip


def grouped_weight_gradient(
    kernels: str, x: Tensor, dz: Tensor, offsets: Tensor, gather: Tensor | None, tf32: bool
) -> Tensor:
    """dW [groups, K, N]"""
    return _weight_gradient(x, dz, offsets, gather, tf32, kernels)


def _index(index: Tensor | None) -> Tensor | None:
    return None if index is None else index.to(torch.int32).contiguous()


def _row_weights(row_weights: Tensor | None) -> Tensor | None:
    return None if row_weights is None else row_weights.to(torch.float32).contiguous()


def _saved_dtype(x: Tensor, row_weights: Tensor | None, activation: str) -> torch.dtype:
    """z's dtype: the row weights' gradient, a sum of float32 products with activation(z), shows how z was rounded."""
    return torch.float32 if activation and row_weights is not None else x.dtype


def _forward(
    x: Tensor,
    weights: Tensor,
    row_weights: Tensor | None,
    bias: Tensor | None,
    offsets: Tensor,
    gather: Tensor | None,
    scatter: Tensor | None,
    x_scale: Tensor | None,
    weight_scale: Tensor | None,
    out_rows: int,
    out_dtype: torch.dtype,
    tf32: bool,
    activation: str,
    packed: str,
    save: bool,
    kernels: str,
) -> tuple[Tensor, Tensor]:
    size = (GroupedTensors(gather, scatter).num_rows(x), weights.shape[2])
    saved_dtype = _saved_dtype(x, row_weights, activation)
    preactivation = torch.empty(size, dtype=saved_dtype, device=x.device) if save else None
    params = GroupedParams(out_dtype, out_rows, tf32, activation, packed)
    tensors = GroupedTensors(
        _index(gather), _index(scatter), _row_weights(row_weights), bias, x_scale, weight_scale, preactivation
    )
    y = resolve(kernels).grouped_forward(x, weights, _index(offsets), params, tensors)
    return y, x.new_empty(0, dtype=saved_dtype) if preactivation is None else preactivation


def _fake_forward(
    x, weights, row_weights, bias, offsets, gather, scatter, x_scale, weight_scale, out_rows, out_dtype, tf32,
    activation, packed, save, kernels,
):  # fmt: skip
    columns = GroupedParams(out_dtype, out_rows, tf32, activation, packed).out_columns(weights.shape[2])
    size = (GroupedTensors(gather, scatter).num_rows(x), weights.shape[2]) if save else (0,)
    saved = x.new_empty(size, dtype=_saved_dtype(x, row_weights, activation))
    return x.new_empty((out_rows, columns), dtype=out_dtype), saved


def _backward(
    dy: Tensor,
    x: Tensor,
    weights: Tensor,
    row_weights: Tensor | None,
    bias: Tensor | None,
    offsets: Tensor,
    gather: Tensor | None,
    scatter: Tensor | None,
    preactivation: Tensor,
    activation: str,
    packed: str,
    tf32: bool,
    wanted: list[bool],
    kernels: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, the weights, the row weights and the bias; those not wanted are empty."""
    module, gradients, results = resolve(kernels), resolve(_GRADIENTS), [x.new_empty(0) for _ in range(4)]
    offsets, gather, scatter = _index(offsets), _index(gather), _index(scatter)  # type: ignore[assignment]
    rows = GroupedTensors(gather, scatter).num_rows(x)
    params = GroupedParams(x.dtype, rows, tf32, activation, packed)
    if activation or scatter is not None or row_weights is not None:
        saved = preactivation if activation or wanted[2] else None
        dz, row_weight_gradient = gradients.product_gradient(
            unit_stride(dy), saved, offsets, scatter, _row_weights(row_weights), activation, params.gate, rows, x.dtype,
            wanted[2],
        )  # fmt: skip
        if wanted[2]:
            results[2] = row_weight_gradient.to(row_weights.dtype)  # type: ignore[union-attr]
    else:
        dz = unit_stride(dy.to(x.dtype))
    plain = GroupedParams(x.dtype, rows, tf32)
    if wanted[0]:
        dx = module.grouped_forward(dz, weights.transpose(1, 2), offsets, plain, GroupedTensors())
        results[0] = dx if gather is None else gradients.sum_repeated_rows(dx, gather, x.shape[0])
    if wanted[1]:
        results[1] = module.grouped_weight_gradient(x, dz, offsets, plain, gather)
    if wanted[3] and bias is not None:
        results[3] = gradients.sum_by_group(dz, offsets).to(bias.dtype)
    return results[0], results[1], results[2], results[3]


def _fake_backward(
    dy, x, weights, row_weights, bias, offsets, gather, scatter, preactivation, activation, packed, tf32, wanted,
    kernels,
):  # fmt: skip
    given = (x, weights, row_weights, bias)
    return tuple(tensor.new_empty(tensor.shape) if want else x.new_empty(0) for tensor, want in zip(given, wanted))


def _setup_context(ctx, inputs, output):
    x, weights, row_weights, bias, offsets, gather, scatter, _, _, _, _, tf32, activation, packed, _, kernels = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weights, row_weights, bias, offsets, gather, scatter, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.settings = (activation, packed, tf32)
    ctx.kernels = kernels


def _pull_back(ctx, dy, _):
    if dy is None:
        return (None,) * 16
    wanted = list(ctx.needs_input_grad[:4])
    results = _grouped_backward(dy, *ctx.saved_tensors, *ctx.settings, wanted, ctx.kernels)
    return *[result if want else None for result, want in zip(results, wanted)], *[None] * 12


def _forward_weight_gradient(
    x: Tensor, dz: Tensor, offsets: Tensor, gather: Tensor | None, tf32: bool, kernels: str
) -> Tensor:
    params = GroupedParams(x.dtype, dz.shape[0], tf32)
    found: Tensor = resolve(kernels).grouped_weight_gradient(
        x, unit_stride(dz), _index(offsets), params, _index(gather)
    )  # fmt: skip
    return found


def _fake_weight_gradient(x, dz, offsets, gather, tf32, kernels):
    return x.new_empty((offsets.shape[0] - 1, x.shape[1], dz.shape[1]))


_weight_gradient = KernelOp("grouped_weight_gradient", _forward_weight_gradient, _fake_weight_gradient)
_grouped_backward = KernelOp("grouped_matmul_backward", _backward, _fake_backward)
_grouped = KernelOp("grouped_matmul", _forward, _fake_forward, setup_context=_setup_context, backward=_pull_back)
