"""Activations in plain torch: the ground truth, in whatever precision it is given."""

from __future__ import annotations

from torch import Tensor

from flashkernel.blocks.activation import FORMULAS, apply_gate
from flashkernel.blocks.gate_up import split_gate_up


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """x Phi(x), or its tanh approximation."""
    return FORMULAS["gelu_tanh" if approximate == "tanh" else "gelu"](x)


def silu(x: Tensor) -> Tensor:
    """x sigmoid(x)."""
    return FORMULAS["silu"](x)


def relu(x: Tensor) -> Tensor:
    """max(x, 0)."""
    return FORMULAS["relu"](x)


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)^2."""
    return FORMULAS["squared_relu"](x)


def swiglu(gate: Tensor, up: Tensor | None = None, *, packed: str = "halves") -> Tensor:
    """silu(gate) up."""
    return _gated("silu", gate, up, packed)


def geglu(gate: Tensor, up: Tensor | None = None, *, approximate: str = "tanh", packed: str = "halves") -> Tensor:
    """gelu(gate) up."""
    return _gated("gelu_tanh" if approximate == "tanh" else "gelu", gate, up, packed)


def reglu(gate: Tensor, up: Tensor | None = None, *, packed: str = "halves") -> Tensor:
    """relu(gate) up."""
    return _gated("relu", gate, up, packed)


def gpt_oss_glu(
    gate: Tensor, up: Tensor | None = None, *, alpha: float = 1.702, limit: float = 7.0, packed: str = "interleaved"
) -> Tensor:
    """(up + 1) gate sigmoid(alpha gate), gate clamped from above and up from both sides."""
    return _gated("gpt_oss", gate, up, packed, alpha, limit)


def _gated(kind: str, gate: Tensor, up: Tensor | None, packed: str, *clamp: float) -> Tensor:
    gate, up = split_gate_up(gate, packed) if up is None else (gate, up)
    return apply_gate(FORMULAS, kind, gate, up, *clamp)
