"""The MLP in plain torch: the ground truth, in whatever precision it is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks.activation import FORMULAS, apply_gate
from flashkernel.blocks.epilogue import GATES, Gate
from flashkernel.blocks.gate_up import split_gate_up
from flashkernel.blocks.weight import Weight, rounded_activations
from flashkernel.ops.mlp.params import MlpOptions


def mlp(
    x: Tensor, gate_up_weight: Tensor | Weight | Sequence[Tensor | Weight], down_weight: Tensor | Weight, **options: Any
) -> Tensor:
    """activation(norm(x) W_up^T + b_up) W_down^T + b_down + residual, or activation(gate) * up in its place."""
    params = MlpOptions(**options)
    dtype = x.dtype if params.out_dtype is None else params.out_dtype
    if params.norm_weight is not None:
        scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + params.norm_eps)
        x = (scaled * (params.norm_weight + params.norm_offset)).to(x.dtype)
    weights: list[Any] = (
        [gate_up_weight] if isinstance(gate_up_weight, (Tensor, Weight)) else list(gate_up_weight)
    )  # fmt: skip
    bias = params.gate_up_bias
    biases = [bias] * len(weights) if bias is None or isinstance(bias, Tensor) else bias
    products = [_product(x, weight, bias) for weight, bias in zip(weights, biases)]
    name = params.activation if isinstance(params.activation, str) else params.activation.kind
    if isinstance(params.activation, Gate) or name in GATES:
        gate = params.activation if isinstance(params.activation, Gate) else Gate(GATES[name])
        left, right = products if len(products) == 2 else split_gate_up(products[0], params.packed)
        hidden = apply_gate(FORMULAS, gate.kind, left, right, gate.alpha, gate.limit)
    else:
        hidden = FORMULAS[name](products[0])
    y = _product(hidden, down_weight, params.down_bias)
    return (y if params.residual is None else y + params.residual).to(dtype)


def _product(x: Tensor, matrix: Tensor | Weight, bias: Tensor | None) -> Tensor:
    """x matrix^T + bias; a quantized weight is the matrix that it stands for, and may ask for x in 8 bits."""
    if isinstance(matrix, Weight):
        x, matrix = rounded_activations(x, matrix), matrix.dequantize(x.dtype)
    y = x @ matrix.transpose(0, 1)
    return y if bias is None else (y + bias).to(y.dtype)
