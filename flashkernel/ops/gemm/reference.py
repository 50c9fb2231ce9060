"""The linear layer in plain torch: the ground truth, in whatever precision it is given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks.activation import FORMULAS, apply_gate
from flashkernel.blocks.epilogue import GATES, Activation, Gate
from flashkernel.blocks.gate_up import split_gate_up
from flashkernel.blocks.weight import Layout, Weight, format_named, rounded_activations
from flashkernel.ops.gemm.params import Biases, LinearParams, Weights


def linear(x: Tensor, weight: Weights, bias: Biases = None, **options: Any) -> Tensor | tuple[Tensor, ...]:
    """scale * activation(norm(x) weight^T + bias) + residual, or activation(gate) * up of a pair of products."""
    params = LinearParams(**options)
    residual, norm_weight = params.residual, params.norm_weight
    dtype = x.dtype if params.out_dtype is None else params.out_dtype
    if norm_weight is not None:
        scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + params.norm_eps)
        x = (scaled * (norm_weight + params.norm_offset)).to(x.dtype)
    single = isinstance(weight, (Tensor, Weight))
    weights: list[Any] = [weight] if single else list(weight)  # type: ignore[arg-type]
    biases = [None] * len(weights) if bias is None else [bias] if isinstance(bias, Tensor) else list(bias)
    products = [
        _product(x, matrix) + (0 if vector is None else vector) for matrix, vector in zip(weights, biases)
    ]  # fmt: skip
    gate = _gate(params.activation)
    if gate is not None:
        left, right = products if len(products) == 2 else split_gate_up(products[0], params.packed)
        products = [apply_gate(FORMULAS, gate.kind, left, right, gate.alpha, gate.limit)]
    elif params.activation is not None:
        kind = params.activation if isinstance(params.activation, str) else params.activation.kind
        products = [FORMULAS[kind](product) for product in products]
    outputs = [(product * params.scale + (0 if residual is None else residual)).to(dtype) for product in products]
    if params.splits is not None:
        return outputs[0].split(list(params.splits), -1)
    return outputs[0] if gate is not None or single else tuple(outputs)


def quantized_linear(
    x: Tensor, data: Tensor, scales: Tensor, zeros: Tensor | None = None, bias: Tensor | None = None, *, layout: str
) -> Tensor:
    """x weight^T + bias, where the weight is given by its tensors; a check in float64 has widened some of them."""
    kind: Any = format_named(Layout.parse(layout).format)
    tensors = [data.to(kind.data_dtype), scales.to(kind.scale_dtype), *([] if zeros is None else [zeros])]
    return linear(x, Weight.from_tensors(tensors, layout), bias)  # type: ignore[return-value]


def _product(x: Tensor, matrix: Tensor | Weight) -> Tensor:
    """x matrix^T; a quantized weight is the matrix that it stands for, and may ask for x in 8 bits."""
    if isinstance(matrix, Weight):
        x, matrix = rounded_activations(x, matrix), matrix.dequantize(x.dtype)
    return x @ matrix.transpose(0, 1)


def _gate(activation: str | Activation | Gate | None) -> Gate | None:
    if isinstance(activation, Gate):
        return activation
    return Gate(GATES[activation]) if activation in GATES else None  # type: ignore[index]
