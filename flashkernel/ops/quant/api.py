"""The public quantization functions: argument checks and dispatch."""

from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks.epilogue import GATES
from flashkernel.blocks.gate_up import PACKINGS
from flashkernel.blocks.weight import group_shape_of
from flashkernel.core.arguments import check_finite, check_non_negative, is_float, promoted
from flashkernel.core.dispatch import choose
from flashkernel.core.op import Op
from flashkernel.core.replay import replayed
from flashkernel.ops.quant import library, spec
from flashkernel.ops.quant.reference import scales_shape

_CODES = {torch.float8_e4m3fn: "e4m3", torch.int8: "int8"}
_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


@replayed
def quantize(
    x: Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    granularity: str = "row",
    scale: Tensor | None = None,
    *,
    symmetric: bool = True,
    backend: str | None = None,
) -> tuple[Tensor, ...]:
    """Returns x in 8 bits and its scales, in one pass: x is about (data - zeros) * scales.

    Without `scale` the quantization is dynamic: the largest magnitude of what shares a scale becomes the largest number
    of the dtype (448, 57344 or 127), and the scale of zeros is 1. Values are rounded to nearest, ties to even, and
    saturate. There is no gradient. `Weight.quantize` is for weights.

    Args:
        x: (..., width), float32, float16 or bfloat16; any strides; finite.
        dtype: float8_e4m3fn, float8_e5m2 or int8.
        granularity: What shares a scale: "row", "group" (128 columns of a row), a size such as "1x64", or "tensor",
            which reads x twice.
        scale: Static quantization: float32, () for one scale, else of the shape that `scales` has.
        symmetric: False gives int8 zero points, for values that are not centered at 0.
        backend: The backend to run on ("triton", "torch", ...); None picks the best one that serves the call.

    Returns:
        (data, scales), or (data, scales, zeros) if not symmetric. data has x's shape. scales are float32: () for
        "tensor", (..., 1) for "row", (..., width / columns) rounded up for groups; zeros are int8 of that shape.
        `flashkernel.matmul` takes them as they are.

    Example:
        >>> import torch, flashkernel as fk
        >>> x = torch.randn(4, 256)
        >>> data, scales = fk.quantize(x, torch.int8)
        >>> data.dtype, scales.shape
        (torch.int8, torch.Size([4, 1]))
        >>> bool(((data * scales - x).abs() <= 0.501 * scales).all())
        True
        >>> data, scales = fk.quantize(x, torch.float8_e4m3fn, "group")
        >>> scales.shape
        torch.Size([4, 2])
    """
    group = _check("quantize", x, dtype, granularity)
    if not symmetric and (dtype != torch.int8 or scale is not None):
        raise ValueError(
            "quantize: symmetric=False is for dynamic quantization to int8; give dtype=torch.int8 and no scale"
        )
    wanted = scales_shape(x, group)
    if scale is not None and (
        not is_float(scale) or (tuple(scale.shape) != wanted and scale.ndim > 0) or scale.device != x.device
    ):
        raise ValueError(
            f"quantize: scale is {scale.dtype} {tuple(scale.shape)} on {scale.device}; x {tuple(x.shape)} by "
            f"{granularity} takes a float tensor () or {wanted} on {x.device}"
        )
    chosen = _choose(
        spec.QUANTIZE, backend, x, dtype, group, x.shape[-1], symmetric=symmetric, static=scale is not None
    )
    if chosen.composite:
        if scale is not None and scale.ndim == 0:
            granularity = "tensor"
        found = _composite(chosen, x, dtype, granularity, scale, symmetric=symmetric)
        return found if scale is None else (found[0], scale)
    given = scale
    if group == (-1, -1) and scale is None:
        given = _tensor_scale(x, dtype)
    codes, scales, zeros = library.quantize(
        x, given, _CODES[dtype], _columns(group, x.shape[-1]), symmetric, chosen.target
    )
    data = codes.view(dtype)
    if given is not None:
        return data, given
    return (data, scales) if symmetric else (data, scales, zeros)


def _tensor_scale(x: Tensor, dtype: torch.dtype) -> Tensor:
    """One scale for all of x: a pass of its own."""
    most = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    if not x.numel():
        return torch.ones((), device=x.device)
    largest = torch.linalg.vector_norm(x, float("inf"), dtype=torch.float32)
    scale = (largest * (1.0 / most)).clamp_min(torch.finfo(torch.float32).tiny)
    return torch.where(largest > 0, scale, 1.0)


@replayed
def dequantize(
    data: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    *,
    granularity: str = "row",
    dtype: torch.dtype = torch.bfloat16,
    backend: str | None = None,
) -> Tensor:
    """Returns (data - zeros) * scales, computed in float32 and rounded once: the inverse of `quantize`.

    Args:
        data: (..., width), float8_e4m3fn, float8_e5m2 or int8.
        scales: float32, as `quantize` gives them.
        zeros: int8, or None.
        granularity: What shares a scale, as in `quantize`.
        dtype: Of the result: float32, float16 or bfloat16.
        backend: The backend to run on ("triton", "torch", ...); None picks the best one that serves the call.

    Returns:
        (..., width) in `dtype`.

    Example:
        >>> import torch, flashkernel as fk
        >>> x = torch.randn(4, 256)
        >>> y = fk.dequantize(*fk.quantize(x, torch.int8, symmetric=False), dtype=torch.float32)
        >>> (y - x).abs().max() < 0.02
        tensor(True)
    """
    if data.ndim == 0 or data.dtype not in _DTYPES:
        raise ValueError(f"dequantize: data is {data.dtype} {tuple(data.shape)}; it must be 8-bit data of `quantize`")
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise ValueError(f"dequantize: dtype is {dtype}; it must be float32, float16 or bfloat16")
    group = _group("dequantize", granularity)
    wanted = scales_shape(data, group)
    for name, given, fits in (
        ("scales", scales, is_float(scales)), ("zeros", zeros, zeros is None or zeros.dtype == torch.int8)
    ):  # fmt: skip
        if given is not None and (not fits or tuple(given.shape) != wanted or given.device != data.device):
            raise ValueError(
                f"dequantize: {name} are {given.dtype} {tuple(given.shape)} on {given.device}; data "
                f"{tuple(data.shape)} by {granularity} has {'float32' if name == 'scales' else 'int8'} {wanted} on "
                f"{data.device}"
            )
    chosen = choose(
        spec.DEQUANTIZE, backend, data.device, dtype, code=data.dtype, columns=_columns(group, data.shape[-1])
    )
    if chosen.composite:
        return _composite(chosen, data, scales, zeros, granularity=granularity, dtype=dtype)
    code = _CODES[data.dtype]
    codes = data.view(torch.uint8) if code == "e4m3" else data
    return library.dequantize(codes, scales, zeros, code, _columns(group, data.shape[-1]), dtype, chosen.target)


@replayed
def rms_norm_quantize(
    x: Tensor,
    weight: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    granularity: str = "row",
    eps: float = 1e-6,
    offset: float = 0.0,
    backend: str | None = None,
) -> tuple[Tensor, ...]:
    """Returns `quantize` of the RMSNorm of x, in one pass over memory; the normalized row is not rounded in between.

    Args:
        x: (..., width), float32, float16 or bfloat16; any strides.
        weight: (width,), any float dtype; None means 1.
        residual: Shape and dtype of x; x + residual is normalized.
        dtype: float8_e4m3fn, float8_e5m2 or int8.
        granularity: What shares a scale: "row", "group" (128 columns of a row), or a size such as "1x64".
        eps: Added to the mean square before the root.
        offset: Added to the weight; Gemma's norms take 1.
        backend: The backend to run on ("triton", "torch", ...); None picks the best one that serves the call.

    Returns:
        (data, scales), or (data, scales, x + residual in x's dtype) where a residual is given.

    Example:
        >>> import torch, flashkernel as fk
        >>> x, weight = torch.randn(4, 256), torch.rand(256)
        >>> data, scales = fk.rms_norm_quantize(x, weight, dtype=torch.int8)
        >>> bool(((data * scales - fk.rms_norm(x, weight)).abs() <= 0.501 * scales).all())
        True
    """
    x, residual = promoted(x, residual)
    group = _check("rms_norm_quantize", x, dtype, granularity, whole_tensor=False)
    check_non_negative("rms_norm_quantize", "eps", eps)
    check_finite("rms_norm_quantize", "offset", offset)
    if weight is not None and (
        tuple(weight.shape) != tuple(x.shape[-1:]) or weight.device != x.device or not is_float(weight)
    ):
        raise ValueError(
            f"rms_norm_quantize: weight is {weight.dtype} {tuple(weight.shape)} on {weight.device}; x has "
            f"{x.shape[-1]} columns, so it must be a float tensor ({x.shape[-1]},) on {x.device}"
        )
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype or residual.device != x.device):
        raise ValueError(
            f"rms_norm_quantize: residual is {residual.dtype} {tuple(residual.shape)} on {residual.device}; it must "
            f"match x: {x.dtype} {tuple(x.shape)} on {x.device}"
        )
    chosen = _choose(spec.RMS_NORM_QUANTIZE, backend, x, dtype, group, x.shape[-1])
    if chosen.composite:
        return _composite(chosen, x, weight, residual, dtype=dtype, granularity=granularity, eps=eps, offset=offset)
    codes, scales, total = library.rms_norm_quantize(
        x, weight, residual, _CODES[dtype], _columns(group, x.shape[-1]), float(eps), float(offset), chosen.target
    )
    found = (codes.view(dtype), scales)
    return found if residual is None else (*found, total)


@replayed
def glu_quantize(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    activation: str = "swiglu",
    packed: str = "halves",
    dtype: torch.dtype = torch.float8_e4m3fn,
    granularity: str = "row",
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns `quantize` of a gated activation, activation(gate) * up, in one pass over memory.

    Args:
        gate: (..., width); or, without `up`, gate and up in one tensor (..., 2 * width).
        up: Shape and dtype of gate; None where `gate` holds both.
        activation: "swiglu", "geglu" (tanh), "geglu_exact", "reglu" or "gpt_oss_glu".
        packed: How a tensor holds both: "halves" or "interleaved", as in `flashkernel.swiglu`.
        dtype: float8_e4m3fn, float8_e5m2 or int8.
        granularity: What shares a scale: "row", "group" (128 columns of a row), or a size such as "1x64".
        backend: The backend to run on ("triton", "torch", ...); None picks the best one that serves the call.

    Returns:
        (data (..., width), scales), as `quantize` gives them.

    Example:
        >>> import torch, flashkernel as fk
        >>> gate_up = torch.randn(4, 512)
        >>> data, scales = fk.glu_quantize(gate_up, dtype=torch.int8, granularity="group")
        >>> y = fk.dequantize(data, scales, granularity="group", dtype=torch.float32)
        >>> (y - fk.swiglu(gate_up)).abs().max() <= scales.max()
        tensor(True)
    """
    gate, up = promoted(gate, up)
    group = _check("glu_quantize", gate, dtype, granularity, whole_tensor=False)
    if activation not in GATES:
        raise ValueError(f"glu_quantize: activation is {activation!r}; it must be one of {', '.join(GATES)}")
    if packed not in PACKINGS:
        raise ValueError(f"glu_quantize: packed is {packed!r}; it must be 'halves' or 'interleaved'")
    if up is None and gate.shape[-1] % 2:
        raise ValueError(
            "glu_quantize: without up, gate holds both and needs an even number of columns; its shape is "
            f"{tuple(gate.shape)}"
        )
    if up is not None and (up.shape != gate.shape or up.dtype != gate.dtype or up.device != gate.device):
        raise ValueError(
            f"glu_quantize: up is {up.dtype} {tuple(up.shape)} on {up.device}; it must match gate: {gate.dtype} "
            f"{tuple(gate.shape)} on {gate.device}"
        )
    width = gate.shape[-1] if up is not None else gate.shape[-1] // 2
    chosen = _choose(spec.GLU_QUANTIZE, backend, gate, dtype, group, width)
    if chosen.composite:
        return _composite(chosen, gate, up, activation=activation, packed=packed, dtype=dtype, granularity=granularity)
    codes, scales = library.glu_quantize(
        gate, up, GATES[activation], packed if up is None else "separate", _CODES[dtype], _columns(group, width),
        chosen.target,
    )  # fmt: skip
    return codes.view(dtype), scales


def _group(name: str, granularity: str) -> tuple[int, int]:
    group = group_shape_of(granularity)
    if group[0] not in (1, -1) or (group[0] == -1 and group[1] != -1):
        raise ValueError(
            f"{name}: granularity is {granularity!r}; activations have scales by tensor, row, or group of a row, such "
            "as 1x128; Weight.quantize has blocks"
        )
    return group


def _check(name: str, x: Tensor, dtype: torch.dtype, granularity: str, whole_tensor: bool = True) -> tuple[int, int]:
    """(rows, columns) that share a scale."""
    if x.ndim == 0 or not is_float(x):
        raise ValueError(f"{name}: x must be a float tensor of at least one dim, not {x.dtype} {tuple(x.shape)}")
    if dtype not in _DTYPES:
        raise ValueError(f"{name}: dtype is {dtype}; it must be float8_e4m3fn, float8_e5m2 or int8")
    group = _group(name, granularity)
    if group == (-1, -1) and not whole_tensor:
        raise ValueError(
            f"{name}: one scale for the tensor needs all of it before the first element is stored; take granularity "
            '"row" or "group", or call `quantize` on the result'
        )
    return group


def _columns(group: tuple[int, int], width: int) -> int:
    """Columns that share a scale; at least 1."""
    return max(1, width if group[1] == -1 else group[1])


def _choose(op: Op, backend: str | None, x: Tensor, dtype: torch.dtype, group: Any, width: int, **facts: Any) -> Any:
    return choose(op, backend, x.device, x.dtype, code=dtype, group=group, width=width, **facts)


def _composite(chosen: Any, *tensors: Any, **options: Any) -> Any:
    """Codes have no gradient; torch's casts to 8-bit floats would have one."""
    with torch.no_grad():
        return chosen.run(*tensors, **options)
