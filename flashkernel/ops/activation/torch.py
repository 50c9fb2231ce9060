"""Activations by torch's own operators: the CPU default. Gated ones are computed in float32 and rounded once."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from flashkernel.blocks.activation import NATIVE, apply_gate
from flashkernel.blocks.gate_up import split_gate_up

silu, relu, squared_relu = NATIVE["silu"], NATIVE["relu"], NATIVE["squared_relu"]


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    return F.gelu(x, approximate=approximate)


def _gated(kind: str, gate: Tensor, up: Tensor | None = None, *, packed: str = "halves", **clamp: float) -> Tensor:
    gate, up = split_gate_up(gate, packed) if up is None else (gate, up)
    wide = torch.promote_types(gate.dtype, torch.float32)
    return apply_gate(NATIVE, kind, gate.to(wide), up.to(wide), **clamp).to(gate.dtype)


swiglu, reglu = partial(_gated, "silu"), partial(_gated, "relu")
gpt_oss_glu = partial(_gated, "gpt_oss", packed="interleaved")


def geglu(gate: Tensor, up: Tensor | None = None, *, approximate: str = "tanh", packed: str = "halves") -> Tensor:
    return _gated("gelu_tanh" if approximate == "tanh" else "gelu", gate, up, packed=packed)
