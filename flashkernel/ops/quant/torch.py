"""Quantization of activations by torch's own operators: the CPU default. Norms and gates are computed in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flashkernel.blocks.activation import NATIVE, apply_gate
from flashkernel.blocks.epilogue import GATES
from flashkernel.blocks.gate_up import split_gate_up
from flashkernel.ops.quant.reference import Quantized, dequantize, quantize

__all__ = ["dequantize", "glu_quantize", "quantize", "rms_norm_quantize"]


def rms_norm_quantize(
    x: Tensor, weight: Tensor | None = None, residual: Tensor | None = None, *,
    dtype: torch.dtype = torch.float8_e4m3fn, granularity: str = "row", eps: float = 1e-6, offset: float = 0.0,
) -> Quantized:  # fmt: skip
    wide = torch.promote_types(x.dtype, torch.float32)
    total = x.to(wide) if residual is None else x.to(wide) + residual.to(wide)
    y = F.rms_norm(total, total.shape[-1:], None if weight is None else weight.to(wide) + offset, eps)
    found = quantize(y, dtype, granularity)
    return found if residual is None else (*found, total.to(x.dtype))


def glu_quantize(
    gate: Tensor, up: Tensor | None = None, *, activation: str = "swiglu", packed: str = "halves",
    dtype: torch.dtype = torch.float8_e4m3fn, granularity: str = "row",
) -> Quantized:  # fmt: skip
    gate, up = split_gate_up(gate, packed) if up is None else (gate, up)
    wide = torch.promote_types(gate.dtype, torch.float32)
    return quantize(apply_gate(NATIVE, GATES[activation], gate.to(wide), up.to(wide)), dtype, granularity)
