"""An MLP's forward and backward pass as products of `matmul`, whose epilogues compute what lies between them.

    forward     h, Z = activation(x W_up^T + b_up), its argument       one launch, Z stored for the backward pass
                y = h W_down^T + b_down + residual                     one launch
    backward    dZ, h = (dy W_down) * activation'(Z), activation(Z)    one launch, dZ in the memory of Z
                dW_down = dy^T h;  dx = dZ W_up;  dW_up = dZ^T x       a launch each

Products with an activation, its gradient or a residual in the epilogue run on the backend of the MLP; `matmul` chooses
that of the others, which is cuBLAS's on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashkernel.ops.matmul import matmul, matmul_dact
from flashkernel.ops.mlp.params import MainGrads, MlpParams, MlpTensors

_matmul: Any = matmul  # returns one tensor or two, depending on its arguments


def forward(
    tensors: MlpTensors, params: MlpParams, dtype: torch.dtype, save: bool
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(y, what went into the activation or None)"""
    down, down_bias, residual = tensors.down, tensors.down_bias, tensors.residual
    found = _matmul(
        tensors.x, _transposed(tensors.wide), bias=_alone(tensors.wide_biases), activation=params.piece,
        packed=params.packed, return_preactivation=save, backend=params.backend,
    )  # fmt: skip
    hidden, preactivation = found if save else (found, None)
    if residual is None and down_bias is not None and down_bias.dtype == hidden.dtype == dtype:
        return torch.addmm(down_bias, hidden, down.t()), preactivation  # cuBLAS has an epilogue for a bias
    fused = params.backend if residual is not None else None
    return _matmul(hidden, down.t(), bias=down_bias, residual=residual, out_dtype=dtype, backend=fused), preactivation


def backward(
    dy: Tensor, tensors: MlpTensors, preactivation: Tensor | None, main_grads: MainGrads, params: MlpParams,
    in_place: bool, wanted: list[bool],
) -> list[Tensor | None]:  # fmt: skip
    """Gradients of x, the weights of gate and up, down, and their biases; None for those not wanted or added."""
    results: list[Tensor | None] = [None] * 7
    x, gate_up = tensors.x, tensors.wide
    recomputed = preactivation is None
    z = _preactivation(x, gate_up, tensors.wide_biases) if preactivation is None else preactivation
    dz, hidden = matmul_dact(
        dy, tensors.down, z, activation=params.piece, packed=params.packed,
        dz_out=z if in_place or recomputed else None, backend=params.backend,
    )  # fmt: skip
    if wanted[3]:
        results[3] = _weight_gradient(dy, hidden, main_grads[2])
    del hidden
    parts = list(dz.split([weight.shape[0] for weight in gate_up], 1)) if len(gate_up) > 1 else [dz]
    if wanted[0]:
        dx = _matmul(parts[0], gate_up[0])
        for part, weight in zip(parts[1:], gate_up[1:]):
            dx = torch.addmm(dx, part, weight)
        results[0] = dx
    for index, part in enumerate(parts):
        if wanted[1 + index]:
            results[1 + index] = _weight_gradient(part, x, main_grads[index])
        if wanted[4 + index]:
            results[4 + index] = part.sum(0, dtype=torch.float32)
    if wanted[6]:
        results[6] = dy.sum(0, dtype=torch.float32)
    return results


def _preactivation(x: Tensor, gate_up: list[Tensor], biases: list[Tensor]) -> Tensor:
    """x W^T + b of all weights, side by side."""
    if len(gate_up) == 1:
        return _matmul(x, gate_up[0].t(), bias=_alone(biases))
    sizes = [weight.shape[0] for weight in gate_up]
    z = torch.empty((x.shape[0], sum(sizes)), dtype=x.dtype, device=x.device)
    for index, part in enumerate(z.split(sizes, 1)):
        _matmul(x, gate_up[index].t(), bias=biases[index] if biases else None, out=part)
    return z


def _weight_gradient(dz: Tensor, x: Tensor, main_grad: Tensor | None) -> Tensor | None:
    """dz^T x; added to `main_grad` where there is one, and then None."""
    if main_grad is None:
        return _matmul(dz.t(), x)
    _matmul(dz.t(), x, residual=main_grad, out=main_grad)
    return None


def _transposed(weights: list[Tensor]) -> Tensor | tuple[Tensor, ...]:
    return weights[0].t() if len(weights) == 1 else tuple([weight.t() for weight in weights])


def _alone(biases: list[Tensor]) -> Tensor | tuple[Tensor, ...] | None:
    """None, a tensor, or a pair."""
    return biases[0] if len(biases) == 1 else tuple(biases) or None
