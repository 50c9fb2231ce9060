"""Activations by torch's own operators: the CPU default. Gated ones are computed in float32 and rounded once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flashkernel.ops.activation.reference import unpack


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    return F.gelu(x, approximate=approximate)


def silu(x: Tensor) -> Tensor:
    return F.silu(x)


def relu(x: Tensor) -> Tensor:
    return F.relu(x)


def squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


def swiglu(gate: Tensor, up: Tensor | None = None, *, packed: str = "halves") -> Tensor:
    wide_gate, wide_up = _wide(gate, up, packed)
    return (F.silu(wide_gate) * wide_up).to(gate.dtype)


def geglu(gate: Tensor, up: Tensor | None = None, *, approximate: str = "tanh", packed: str = "halves") -> Tensor:
    wide_gate, wide_up = _wide(gate, up, packed)
    return (F.gelu(wide_gate, approximate=approximate) * wide_up).to(gate.dtype)


def reglu(gate: Tensor, up: Tensor | None = None, *, packed: str = "halves") -> Tensor:
    wide_gate, wide_up = _wide(gate, up, packed)
    return (F.relu(wide_gate) * wide_up).to(gate.dtype)


def gpt_oss_glu(
    gate: Tensor, up: Tensor | None = None, *, alpha: float = 1.702, limit: float = 7.0, packed: str = "interleaved"
) -> Tensor:
    wide_gate, wide_up = _wide(gate, up, packed)
    wide_gate, wide_up = wide_gate.clamp(max=limit), wide_up.clamp(-limit, limit)
    return ((wide_up + 1) * wide_gate * torch.sigmoid(alpha * wide_gate)).to(gate.dtype)


def _wide(gate: Tensor, up: Tensor | None, packed: str) -> tuple[Tensor, Tensor]:
    gate, up = unpack(gate, up, packed)
    wide = torch.promote_types(gate.dtype, torch.float32)
    return gate.to(wide), up.to(wide)
