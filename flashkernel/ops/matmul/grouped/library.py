"""The grouped products' kernels as torch operators, with their gradients.

With z[r] = x[gather[r]] W[g] + bias[g] and y[scatter[r]] = row_weights[r] activation(z[r]), the backward pass computes
dz by rows of the groups (gradients.py), and from it two grouped products: dx = dz W^T and dW[g] = X_g^T dz_g. The
forward pass stores z where an activation or the row weights' gradient needs it.
"""

import torch
from torch import Tensor

from flashkernel.core.arguments import near, unit_stride
from flashkernel.core.library import Gradient, KernelOp, empty_gradients
from flashkernel.core.op import resolve
from flashkernel.ops.matmul.grouped.params import GroupedParams, GroupedTensors

_GRADIENTS = "flashkernel.ops.matmul.grouped.gradients"  # of all kernel modules


def _index(index: Tensor | None) -> Tensor | None:
    return None if index is None else index.to(torch.int32).contiguous()


def _row_weights(row_weights: Tensor | None) -> Tensor | None:
    return None if row_weights is None else row_weights.to(torch.float32).contiguous()


def _saved_dtype(x: Tensor, row_weights: Tensor | None, activation: str) -> torch.dtype:
    """z's dtype: the row weights' gradient, a sum of float32 products with activation(z), shows how z was rounded."""
    return torch.float32 if activation and row_weights is not None else x.dtype


def _forward(
    x: Tensor, weights: Tensor, offsets: Tensor, tensors: GroupedTensors, params: GroupedParams, save: bool,
    kernels: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(y [out_rows, columns], z [rows, N], for the backward pass or the caller; empty unless `save`)"""
    gather, scatter, row_weights, bias, x_scale, weight_scale, _ = tensors
    saved_dtype = _saved_dtype(x, row_weights, params.activation)
    size = (tensors.num_rows(x), weights.shape[2])
    preactivation = torch.empty(size, dtype=saved_dtype, device=x.device) if save else None
    bias, weight_scale = (None if one is None else near(one) for one in (bias, weight_scale))
    given = GroupedTensors(
        _index(gather), _index(scatter), _row_weights(row_weights), bias, x_scale, weight_scale, preactivation
    )
    y = resolve(kernels).grouped_forward(x, weights, _index(offsets), params, given)
    return y, x.new_empty(0, dtype=saved_dtype) if preactivation is None else preactivation


def _fake_forward(x, weights, offsets, tensors, params, save, kernels):
    size = (tensors.num_rows(x), weights.shape[2]) if save else (0,)
    saved = x.new_empty(size, dtype=_saved_dtype(x, tensors.row_weights, params.activation))
    return x.new_empty((params.out_rows, params.out_columns(weights.shape[2])), dtype=params.out_dtype), saved


def _backward(
    dy: Tensor, x: Tensor, weights: Tensor, offsets: Tensor, tensors: GroupedTensors, params: GroupedParams,
    wanted: list[bool], kernels: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, the weights, the row weights and the bias; those not wanted are empty."""
    module, gradients, results = resolve(kernels), resolve(_GRADIENTS), [x.new_empty(0) for _ in range(4)]
    offsets, gather, scatter = _index(offsets), _index(tensors.gather), _index(tensors.scatter)  # type: ignore[assignment]
    rows, activation, row_weights = tensors.num_rows(x), params.activation, tensors.row_weights
    if activation or scatter is not None or row_weights is not None:
        saved = tensors.preactivation if activation or wanted[2] else None
        dz, row_weight_gradient = gradients.product_gradient(
            unit_stride(dy), saved, offsets, scatter, _row_weights(row_weights), activation, params.gate, rows, x.dtype,
            wanted[2],
        )  # fmt: skip
        if wanted[2]:
            results[2] = row_weight_gradient.to(row_weights.dtype)  # type: ignore[union-attr]
    else:
        dz = unit_stride(dy.to(x.dtype))
    plain = GroupedParams(x.dtype, rows, params.tf32)
    if wanted[0]:
        dx = module.grouped_forward(dz, weights.transpose(1, 2), offsets, plain, GroupedTensors())
        results[0] = dx if gather is None else gradients.sum_repeated_rows(dx, gather, x.shape[0])
    if wanted[1]:
        results[1] = module.grouped_weight_gradient(x, dz, offsets, plain, gather)
    if wanted[3] and tensors.bias is not None:
        results[3] = gradients.sum_by_group(dz, offsets).to(tensors.bias.dtype)
    return results[0], results[1], results[2], results[3]


def _fake_backward(dy, x, weights, offsets, tensors, params, wanted, kernels):
    return empty_gradients((x, weights, tensors.row_weights, tensors.bias), wanted)


def _setup_context(ctx, inputs, output):
    x, weights, offsets, tensors, ctx.params, _, ctx.kernels = inputs
    ctx.save_for_backward(x, weights, offsets, *tensors[:4], output[1])
    ctx.mark_non_differentiable(output[1])


def _pull_back(ctx, wanted, dy, _):
    x, weights, offsets, gather, scatter, row_weights, bias, preactivation = ctx.saved_tensors
    tensors = GroupedTensors(gather, scatter, row_weights, bias, preactivation=preactivation)
    return _grouped_backward(dy, x, weights, offsets, tensors, ctx.params, wanted, ctx.kernels)


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


grouped_weight_gradient = KernelOp("grouped_weight_gradient", _forward_weight_gradient, _fake_weight_gradient)
_grouped_backward = KernelOp("grouped_matmul_backward", _backward, _fake_backward)
grouped_matmul = KernelOp(
    "grouped_matmul",
    _forward,
    _fake_forward,
    Gradient(_setup_context, _pull_back, ("x", "weights", "row_weights", "bias")),
)
