"""Activations and gates in torch: as formulas, for the references, and as torch's own operators."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

Functions = Mapping[str, Callable[[Tensor], Tensor]]


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


FORMULAS: Functions = {
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": torch.relu,
    "silu": lambda x: x * torch.sigmoid(x),
    "squared_relu": lambda x: torch.relu(x).square(),
}
NATIVE: Functions = {
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": F.relu,
    "silu": F.silu,
    "squared_relu": _squared_relu,
}


def apply_gate(
    functions: Functions, kind: str, gate: Tensor, up: Tensor, alpha: float = 1.702, limit: float = 7.0
) -> Tensor:
    """Returns activation(gate) * up; for the kind "gpt_oss" (up + 1) * gate * sigmoid(alpha * gate), both clamped."""
    if kind != "gpt_oss":
        return functions[kind](gate) * up
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)
