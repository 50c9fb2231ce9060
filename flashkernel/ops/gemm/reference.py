"""The linear layer in plain torch: the ground truth, in whatever precision it is given."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flashkernel.blocks.epilogue import GATES, Activation, Gate


def linear(
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    bias: Tensor | Sequence[Tensor] | None = None,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    *,
    activation: str | Activation | Gate | None = None,
    packed: str = "halves",
    splits: Sequence[int] | None = None,
    scale: float = 1.0,
    norm_eps: float = 1e-6,
    norm_offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """scale * activation(norm(x) weight^T + bias) + residual, or activation(gate) * up of a pair of products."""
    dtype = x.dtype if out_dtype is None else out_dtype
    if norm_weight is not None:
        scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm_eps)
        x = (scaled * (norm_weight + norm_offset)).to(x.dtype)
    weights = [weight] if isinstance(weight, Tensor) else list(weight)
    biases = [None] * len(weights) if bias is None else [bias] if isinstance(bias, Tensor) else list(bias)
    products = [
        x @ matrix.transpose(0, 1) + (0 if vector is None else vector) for matrix, vector in zip(weights, biases)
    ]
    gate = _gate(activation)
    if gate is not None:
        products = [_gated(gate, *_pair(products, packed))]
    elif activation is not None:
        kind = activation if isinstance(activation, str) else activation.kind
        products = [_ACTIVATIONS[kind](product) for product in products]
    outputs = [(product * scale + (0 if residual is None else residual)).to(dtype) for product in products]
    if splits is not None:
        return outputs[0].split(list(splits), -1)
    return outputs[0] if gate is not None or isinstance(weight, Tensor) else tuple(outputs)


def _gate(activation: str | Activation | Gate | None) -> Gate | None:
    if isinstance(activation, Gate):
        return activation
    return Gate(GATES[activation]) if activation in GATES else None  # type: ignore[index]


def _pair(products: list[Tensor], packed: str) -> tuple[Tensor, Tensor]:
    """(gate, up) of two products or of a packed one."""
    if len(products) == 2:
        return products[0], products[1]
    if packed == "interleaved":
        return products[0][..., ::2], products[0][..., 1::2]
    half = products[0].shape[-1] // 2
    return products[0][..., :half], products[0][..., half:]


def _gated(gate: Gate, left: Tensor, right: Tensor) -> Tensor:
    if gate.kind != "gpt_oss":
        return _ACTIVATIONS[gate.kind](left) * right
    left, right = left.clamp(max=gate.limit), right.clamp(-gate.limit, gate.limit)
    return (right + 1) * left * torch.sigmoid(gate.alpha * left)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": torch.relu,
    "silu": lambda x: x * torch.sigmoid(x),
    "squared_relu": lambda x: torch.relu(x).square(),
}
