"""Quantization of activations in plain torch: the ground truth.

Norms and gates are computed in the precision of their inputs. Scales and codes are float32 arithmetic by definition:
code = round(x * (1 / scale) + zero), so that every backend gives the same ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashkernel.blocks.activation import FORMULAS, apply_gate
from flashkernel.blocks.epilogue import GATES
from flashkernel.blocks.fp8 import expand_scales, quantize_fp8_groups, round_to_fp8
from flashkernel.blocks.gate_up import split_gate_up
from flashkernel.blocks.integers import INT8, integer_scales, round_to_integers
from flashkernel.blocks.weight import group_shape_of

Quantized = tuple[Tensor, ...]  # (data, scales), (data, scales, zeros), and what else a function gives


def quantize(
    x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn, granularity: str = "row", scale: Tensor | None = None, *,
    symmetric: bool = True,
) -> Quantized:  # fmt: skip
    """(data, scales), or (data, scales, zeros) if not symmetric; a given scale is used instead of the largest value."""
    group = group_shape_of(granularity)
    matrix = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    zeros = None
    if scale is not None:
        scales = scale.float().reshape(scales_shape(matrix, group))
    elif dtype == torch.int8:
        scales, zeros = integer_scales(matrix, group, INT8, symmetric)
    else:
        scales = quantize_fp8_groups(matrix, group, dtype)[1]
    data = (
        round_to_integers(matrix, scales, zeros, group, INT8)
        if dtype == torch.int8
        else round_to_fp8(matrix, scales, group, dtype)
    )
    shape = scales_shape(x, group)
    found = (data.view(x.shape), scales.view(shape))
    return found if zeros is None else (*found, zeros.view(shape))


def scales_shape(x: Tensor, group: tuple[int, int]) -> tuple[int, ...]:
    """() for one scale, (..., 1) for one of each row, (..., groups) for one of each group of columns."""
    if group == (-1, -1):
        return ()
    return (*x.shape[:-1], 1 if group[1] == -1 else -(-x.shape[-1] // group[1]))


def dequantize(
    data: Tensor, scales: Tensor, zeros: Tensor | None = None, *, granularity: str = "row",
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:  # fmt: skip
    """(data - zeros) * scales."""
    group = group_shape_of(granularity)
    wide = torch.float64 if torch.float64 in (data.dtype, scales.dtype) else torch.float32
    values = data.to(wide)
    if zeros is not None:
        values = values - _expanded(zeros.to(wide), group, data)
    return (values * _expanded(scales.to(wide), group, data)).to(dtype)


def _expanded(scales: Tensor, group: tuple[int, int], data: Tensor) -> Tensor:
    return scales if scales.ndim < 2 and data.ndim != scales.ndim else expand_scales(scales, (1, group[1]), data.shape)


def rms_norm_quantize(
    x: Tensor, weight: Tensor | None = None, residual: Tensor | None = None, *,
    dtype: torch.dtype = torch.float8_e4m3fn, granularity: str = "row", eps: float = 1e-6, offset: float = 0.0,
) -> Quantized:  # fmt: skip
    """quantize(total / rms(total) * (weight + offset)) where total = x + residual; total comes last if it is one."""
    total = x if residual is None else x + residual
    y = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * (weight + offset)
    found = quantize(y, dtype, granularity)
    return found if residual is None else (*found, total)


def glu_quantize(
    gate: Tensor, up: Tensor | None = None, *, activation: str = "swiglu", packed: str = "halves",
    dtype: torch.dtype = torch.float8_e4m3fn, granularity: str = "row",
) -> Quantized:  # fmt: skip
    """quantize(activation(gate) * up)."""
    gate, up = split_gate_up(gate, packed) if up is None else (gate, up)
    return quantize(apply_gate(FORMULAS, GATES[activation], gate, up), dtype, granularity)
