"""Matrix products in plain torch: the ground truth, in whatever precision it is given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks.activation import FORMULAS, apply_gate
from flashkernel.blocks.dropout import keep
from flashkernel.blocks.epilogue import Activation, Gate, activation_piece
from flashkernel.blocks.fp8 import FP8, SCALE_BLOCK, expand_scales, quantize_fp8_groups
from flashkernel.blocks.gate_up import join_gate_up, split_gate_up
from flashkernel.ops.matmul.params import DactOptions, MatmulOptions, Pair

WIDE = (torch.float32, torch.float64)


def matmul(a: Tensor, b: Tensor | Pair, **options: Any) -> Tensor | tuple[Tensor, ...]:
    """dropout(scale * activation(A B + bias)) + residual, where A and B are multiplied by their scales first.

    With `out_quantize` also the scales of its blocks or rows, and with `return_preactivation` also A B + bias.
    """
    params = MatmulOptions(**options)
    kept = default_dtype(a.dtype)
    if params.a_scale is not None and params.b_scale is not None and isinstance(b, Tensor):
        a_scale, b_scale = as_matrices(params.a_scale, params.b_scale)
        a, b = dequantized(a, a_scale), dequantized(b, b_scale)
    matrices, bias = [b] if isinstance(b, Tensor) else b, params.bias
    biases = [None, None] if bias is None else [bias] if isinstance(bias, Tensor) else bias
    values = [
        torch.matmul(_widened(a), _widened(matrix)) + (0 if vector is None else vector)
        for matrix, vector in zip(matrices, biases)
    ]
    preactivation = values[0] if len(values) == 1 else join_gate_up(values[0], values[1], params.packed)
    value = activated(preactivation, params.activation, params.packed) * params.scale
    if params.dropout > 0:
        value = torch.where(kept_elements(value, params), value / (1 - params.dropout), 0.0)
    results = stored(value if params.residual is None else value + params.residual, kept, params)
    if params.return_preactivation:
        results = (*results, preactivation.to(kept))
    return results if len(results) > 1 else results[0]


def matmul_dact(a: Tensor, b: Tensor, preactivation: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """(G * activation'(Z), activation(Z)) where G = A B is the gradient of activation(Z)."""
    params, gradient = DactOptions(**options), torch.matmul(a, b)
    with torch.enable_grad():
        z = preactivation.detach().to(gradient.dtype).requires_grad_()
        value = activated(z, params.activation, params.packed)
        (dz,) = torch.autograd.grad(value, z, gradient)
    dz = dz.to(preactivation.dtype)
    return dz if params.dz_out is None else params.dz_out.copy_(dz), value.detach().to(preactivation.dtype)


def activated(preactivation: Tensor, activation: str | Activation | Gate | None, packed: str) -> Tensor:
    """activation(Z); of a gate, Z holds gate and up."""
    piece = activation_piece(activation)
    if isinstance(piece, Gate):
        gate, up = split_gate_up(preactivation, packed)
        return apply_gate(FORMULAS, piece.kind, gate, up, piece.alpha, piece.limit)
    return preactivation if piece is None else FORMULAS[piece.kind](preactivation)


def stored(value: Tensor, kept: torch.dtype, params: MatmulOptions) -> tuple[Tensor, ...]:
    """The result in the output's dtype, and with `out_quantize` its scales. `kept` is the dtype of an intermediate."""
    if params.out_quantize == "block":
        return quantize_fp8_groups(value, (1, SCALE_BLOCK))
    if params.out_quantize == "row":
        return quantize_fp8_groups(value.to(kept), (1, -1))
    dtype = kept if params.out_dtype is None else params.out_dtype
    if dtype == FP8:
        limit = torch.finfo(FP8).max
        value = (value if params.out_scale is None else value / params.out_scale).clamp(-limit, limit)
    return (value.to(dtype),)


def kept_elements(value: Tensor, params: MatmulOptions) -> Tensor:
    """Which elements of a product dropout keeps: bool, of its shape."""
    batch = value.shape[0] if value.ndim == 3 else 1
    kept = keep(params.seed, batch, 1, value.shape[-2], value.shape[-1], params.dropout, value.device)
    return kept.view(value.shape)


def _widened(x: Tensor) -> Tensor:
    return x if x.dtype.itemsize > 1 else x.float()


def default_dtype(dtype: torch.dtype) -> torch.dtype:
    """The output's dtype unless one is asked for: the operands', and bfloat16 of 8-bit operands."""
    return dtype if dtype.itemsize > 1 else torch.bfloat16


def as_matrices(a_scale: Tensor, b_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Scales of at least 2 dims: one for all as [1, 1], one for each row of A as [M, 1] and column of B as [1, N]."""
    return (
        a_scale.reshape(-1, 1) if a_scale.ndim < 2 else a_scale,
        b_scale.reshape(1, -1) if b_scale.ndim < 2 else b_scale,
    )


def dequantized(x: Tensor, scale: Tensor) -> Tensor:
    """x times its scales, in the scales' precision. A dim of the scales has one for all, for each, or for every 128."""
    wide = scale.dtype if scale.dtype in WIDE else torch.float32
    group = [SCALE_BLOCK if scale.shape[dim] not in (1, x.shape[dim]) else 1 for dim in (-2, -1)]
    return x.to(wide) * expand_scales(scale.to(wide), group, x.shape)
