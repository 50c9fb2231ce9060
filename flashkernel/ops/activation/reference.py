"""Activations in plain torch: the ground truth, in whatever precision it is given."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """x times the normal distribution's cumulative function at x, or its tanh approximation."""
    if approximate == "tanh":
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def silu(x: Tensor) -> Tensor:
    """x sigmoid(x)."""
    return x * torch.sigmoid(x)


def relu(x: Tensor) -> Tensor:
    """max(x, 0)."""
    return torch.relu(x)


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)^2."""
    return torch.relu(x).square()


def swiglu(gate: Tensor, up: Tensor | None = None, *, packed: str = "halves") -> Tensor:
    """silu(gate) up."""
    gate, up = unpack(gate, up, packed)
    return silu(gate) * up


def geglu(gate: Tensor, up: Tensor | None = None, *, approximate: str = "tanh", packed: str = "halves") -> Tensor:
    """gelu(gate) up."""
    gate, up = unpack(gate, up, packed)
    return gelu(gate, approximate=approximate) * up


def reglu(gate: Tensor, up: Tensor | None = None, *, packed: str = "halves") -> Tensor:
    """relu(gate) up."""
    gate, up = unpack(gate, up, packed)
    return relu(gate) * up


def gpt_oss_glu(
    gate: Tensor, up: Tensor | None = None, *, alpha: float = 1.702, limit: float = 7.0, packed: str = "interleaved"
) -> Tensor:
    """(up + 1) gate sigmoid(alpha gate), the gate clamped from above and up from both sides."""
    gate, up = unpack(gate, up, packed)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


def unpack(gate: Tensor, up: Tensor | None, packed: str) -> tuple[Tensor, Tensor]:
    """(gate, up), each [..., width], of a pair or of one packed tensor [..., 2 width]."""
    if up is not None:
        return gate, up
    if packed == "interleaved":
        return gate[..., ::2], gate[..., 1::2]
    width = gate.shape[-1] // 2
    return gate[..., :width], gate[..., width:]
