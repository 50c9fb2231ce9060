"""The quantization kernels as torch operators. Codes of e4m3 leave them as uint8; api.py gives them their dtype."""

import torch
from torch import Tensor

from flashkernel.core.arguments import as_rows
from flashkernel.core.library import KernelOp
from flashkernel.core.op import resolve

_STORED = {"e4m3": torch.uint8, "int8": torch.int8}


def _scales_shape(x: Tensor, width: int, columns: int) -> tuple[int, ...]:
    return (*x.shape[:-1], -(-width // columns) if width else 1)


def _quantize(
    x: Tensor, scale: Tensor | None, code: str, columns: int, symmetric: bool, kernels: str
) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, scales, zeros); scales are empty if one is given, zeros if symmetric."""
    given = None if scale is None else scale.float().contiguous()
    codes, scales, zeros = resolve(kernels).quantize(as_rows(x), given, code, columns, symmetric)
    shape = _scales_shape(x, x.shape[-1], columns)
    return (
        codes.view(x.shape),
        scales.view(shape) if scale is None else scales,
        zeros if symmetric else zeros.view(shape),
    )


def _fake_quantize(x, scale, code, columns, symmetric, kernels):
    shape = _scales_shape(x, x.shape[-1], columns)
    return (
        x.new_empty(x.shape, dtype=_STORED[code]),
        x.new_empty(shape if scale is None else 0, dtype=torch.float32),
        x.new_empty(0 if symmetric else shape, dtype=torch.int8),
    )


def _dequantize(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, code: str, columns: int, dtype: torch.dtype, kernels: str
) -> Tensor:
    zeros = None if zeros is None else zeros.contiguous()
    values = resolve(kernels).dequantize(as_rows(codes), scales.float().contiguous(), zeros, code, columns, dtype)
    return values.view(codes.shape)


def _fake_dequantize(codes, scales, zeros, code, columns, dtype, kernels):
    return codes.new_empty(codes.shape, dtype=dtype)


def _rms_norm_quantize(
    x: Tensor,
    weight: Tensor | None,
    residual: Tensor | None,
    code: str,
    columns: int,
    eps: float,
    offset: float,
    kernels: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, scales, x + residual); the last is empty without a residual."""
    weight = None if weight is None else weight.contiguous()
    flat_residual = None if residual is None else as_rows(residual)
    codes, scales, total = resolve(kernels).rms_norm_quantize(
        as_rows(x), weight, flat_residual, code, columns, eps, offset
    )
    shape = _scales_shape(x, x.shape[-1], columns)
    return codes.view(x.shape), scales.view(shape), total if residual is None else total.view(x.shape)


def _fake_rms_norm_quantize(x, weight, residual, code, columns, eps, offset, kernels):
    return (
        x.new_empty(x.shape, dtype=_STORED[code]),
        x.new_empty(_scales_shape(x, x.shape[-1], columns), dtype=torch.float32),
        x.new_empty(0 if residual is None else x.shape),
    )


def _glu_quantize(
    gate: Tensor, up: Tensor | None, kind: str, layout: str, code: str, columns: int, kernels: str
) -> tuple[Tensor, Tensor]:
    """(codes, scales); layout is "separate", "halves" or "interleaved"."""
    flat_up = None if up is None else as_rows(up)
    codes, scales = resolve(kernels).glu_quantize(as_rows(gate), flat_up, kind, layout, code, columns)
    width = _glu_width(gate, layout)
    return codes.view(*gate.shape[:-1], width), scales.view(_scales_shape(gate, width, columns))


def _glu_width(gate: Tensor, layout: str) -> int:
    return gate.shape[-1] if layout == "separate" else gate.shape[-1] // 2


def _fake_glu_quantize(gate, up, kind, layout, code, columns, kernels):
    width = _glu_width(gate, layout)
    return (
        gate.new_empty((*gate.shape[:-1], width), dtype=_STORED[code]),
        gate.new_empty(_scales_shape(gate, width, columns), dtype=torch.float32),
    )


quantize = KernelOp("quantize", _quantize, _fake_quantize)
dequantize = KernelOp("dequantize", _dequantize, _fake_dequantize)
rms_norm_quantize = KernelOp("rms_norm_quantize", _rms_norm_quantize, _fake_rms_norm_quantize)
glu_quantize = KernelOp("glu_quantize", _glu_quantize, _fake_glu_quantize)
