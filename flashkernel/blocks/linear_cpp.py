"""Products with quantized weights on a CPU, by the C++ kernels of blocks/cpp.

`unsupported` says which weights they read. `LinearCall` is a layer that is called often: everything but x, residual and
output is set once, so that a call costs the host a few microseconds.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks.weight import Layout, Weight
from flashkernel.core import cpp

_POINTER = ctypes.c_void_p
SOURCE = Path(__file__).parent / "cpp" / "linear.cpp"
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # of x, biases, norm weights, residuals and outputs
GEMM_ROWS = 16  # from so many rows of x that are not rounded on, BLAS with a dequantized slice is faster
BLOCK = 32  # columns that kernels read at a time
_INT4, _INT8, _MXFP4, _Q6_K = range(4)
_FLOAT32, _FLOAT16, _E8M0, _SCALES_Q4_K, _SCALES_Q6_K = range(5)
_NO_OFFSETS, _ZEROS_UINT8, _ZEROS_INT8, _MINIMA = range(4)
# format: codes, kind of its scales, kind of its zeros
_KINDS = {
    "int4": (_INT4, _FLOAT32, _ZEROS_UINT8),
    "int8": (_INT8, _FLOAT32, _ZEROS_INT8),
    "mxfp4": (_MXFP4, _E8M0, _NO_OFFSETS),
    "q4_1": (_INT4, _FLOAT16, _MINIMA),
    "q4_k": (_INT4, _SCALES_Q4_K, _NO_OFFSETS),
    "q6_k": (_Q6_K, _SCALES_Q6_K, _NO_OFFSETS),
}


class _Matrix(ctypes.Structure):
    """A quantized matrix, as blocks/cpp/weight_formats.h has it."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("data", "scales", "offsets")],
        *[(name, ctypes.c_int64) for name in ("rows", "columns", "group")],
        *[(name, ctypes.c_int64) for name in ("data_stride", "scale_stride", "offset_stride")],
        *[(name, ctypes.c_int32) for name in ("codes", "scale_kind", "offset_kind", "padding")],
    ]


class _Linear(ctypes.Structure):
    """A linear layer, as blocks/cpp/linear.cpp has it."""

    _fields_ = [
        ("weight", _Matrix),
        ("up", _Matrix),
        *[(name, ctypes.c_void_p) for name in ("bias", "up_bias", "norm_weight", "x", "residual", "out")],
        *[(name, ctypes.c_int64) for name in ("rows", "x_stride", "residual_stride", "out_stride", "x_group")],
        ("norm_eps", ctypes.c_float),
        ("norm_offset", ctypes.c_float),
        *[(f"{name}_dtype", ctypes.c_int32) for name in ("x", "out", "residual", "bias", "norm")],
        ("threads", ctypes.c_int32),
    ]


@cache
def _kernels() -> Any:
    found = cpp.library(SOURCE)
    for function in (found.linear, found.linear_team):
        function.argtypes, function.restype = [ctypes.c_void_p], None
    found.dequantize.argtypes = [_POINTER, _POINTER, ctypes.c_int64, ctypes.c_int64, _POINTER, ctypes.c_int]
    found.dequantize.restype = None
    return found


def unsupported(layout: Layout) -> str | None:
    """Why the kernels do not read weights of a layout; None if they do."""
    if layout.format not in _KINDS:
        return f"its kernels read {', '.join(_KINDS)}, not {layout.format}"
    rows, columns = layout.group_shape
    if rows > 1 or (rows == -1 and columns != -1):
        return f"its kernels read scales of whole rows or groups of a row, not of {rows}x{columns}"
    if columns != -1 and columns % BLOCK and layout.format != "q6_k":
        return f"its kernels read groups of multiples of {BLOCK} columns, not of {columns}"
    if layout.activation_dtype not in (None, torch.int8):
        return "its kernels round x to int8 or not at all"
    return None


def _matrix(weight: Weight) -> _Matrix:
    codes, scale_kind, offset_kind = _KINDS[weight.format]
    rows, columns = weight.shape
    scales, zeros = weight.scales, weight.zeros
    assert scales is not None
    each, group = weight.group_shape
    return _Matrix(
        weight.data.data_ptr(), scales.data_ptr(), None if zeros is None else zeros.data_ptr(), rows, columns,
        columns if group == -1 else group, weight.data.stride(0) * weight.data.itemsize,
        0 if each == -1 else scales.stride(0), 0 if zeros is None or each == -1 else zeros.stride(0), codes,
        scale_kind, _NO_OFFSETS if zeros is None else offset_kind, 0,
    )  # fmt: skip


def readable(weight: Weight) -> Weight:
    """The weight with unit strides along its rows; itself where it has them."""
    if all(one.stride(-1) == 1 or one.shape[-1] <= 1 for one in weight.tensors):
        return weight
    return weight._with(
        [None if one is None else one.contiguous() for one in (weight.data, weight.scales, weight.zeros)]
    )


class LinearCall:
    """norm(x) weight^T + bias + residual, or with `up` silu(x weight^T + bias) * (x up^T + up_bias) + residual.

    Args:
        weight: A Weight of a layout that `unsupported` takes, on the CPU.
        up: The second matrix of a gated layer, of the same layout and shape.
        bias: (out,) or None.
        up_bias: The same for `up`.
        norm_weight: (in,): x goes through RMSNorm first.
        eps: Of the norm.
        offset: Added to norm_weight.
        out_dtype: Of the output; None: x's.
    """

    def __init__(
        self,
        weight: Weight,
        up: Weight | None = None,
        bias: Tensor | None = None,
        up_bias: Tensor | None = None,
        norm_weight: Tensor | None = None,
        eps: float = 1e-6,
        offset: float = 0.0,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        self._run, self._team = _kernels().linear, _kernels().linear_team
        weight, up = readable(weight), None if up is None else readable(up)
        if bias is not None and up_bias is not None and bias.dtype != up_bias.dtype:
            bias, up_bias = bias.float(), up_bias.float()
        bias, up_bias, norm_weight = (None if x is None else _vector(x) for x in (bias, up_bias, norm_weight))
        self._kept = (weight, up, bias, up_bias, norm_weight)  # the struct has their addresses
        self._out_dtype = out_dtype
        self.outputs, self.columns = weight.shape
        group = weight.activation_group[1]
        self._call = call = _Linear(
            _matrix(weight), _Matrix() if up is None else _matrix(up), _address(bias), _address(up_bias),
            _address(norm_weight), norm_eps=eps, norm_offset=offset,
            x_group=0 if weight.activation_dtype is None else self.columns if group == -1 else group,
        )  # fmt: skip
        call.bias_dtype = 0 if bias is None else DTYPES[bias.dtype]
        call.norm_dtype = 0 if norm_weight is None else DTYPES[norm_weight.dtype]
        self._pointer = ctypes.addressof(call)

    def __call__(self, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Returns (rows, out) of x (rows, in); x, residual and out have unit strides along their rows."""
        if out is None:
            out = torch.empty((x.shape[0], self.outputs), dtype=self._out_dtype or x.dtype, device="cpu")
        self.bind(x, residual, out)
        self._run(self._pointer)
        return out

    def bind(self, x: Tensor, residual: Tensor | None, out: Tensor) -> tuple[Any, int]:
        """Sets the tensors of a call; `out` may be the residual.

        Returns:
            The function that all threads of a team call, and its argument.
        """
        call = self._call
        call.x, call.x_stride, call.x_dtype = x.data_ptr(), x.stride(0), DTYPES[x.dtype]
        call.out, call.out_stride, call.out_dtype = out.data_ptr(), out.stride(0), DTYPES[out.dtype]
        if residual is None:
            call.residual = None
        else:
            call.residual, call.residual_stride = residual.data_ptr(), residual.stride(0)
            call.residual_dtype = DTYPES[residual.dtype]
        call.rows, call.threads = x.shape[0], torch.get_num_threads()
        return self._team, self._pointer


def _vector(x: Tensor) -> Tensor:
    """A bias or a norm's weight as the kernels read it."""
    return (x if x.dtype in DTYPES else x.float()).contiguous()


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class RowReader:
    """Rows of a quantized matrix in float32, as an embedding's lookup reads them.

    Args:
        weight: A Weight of a layout that `unsupported` takes, on the CPU.
    """

    def __init__(self, weight: Weight) -> None:
        self._weight, self._run = readable(weight), _kernels().dequantize
        self._matrix = _matrix(self._weight)
        self._pointer = ctypes.addressof(self._matrix)

    def __call__(self, rows: Tensor, out: Tensor) -> None:
        """Writes rows `rows` (int64 (count,), contiguous) into `out` (count, columns), contiguous."""
        numbers, count = rows.tolist(), self._matrix.rows
        if numbers and not (min(numbers) >= 0 and max(numbers) < count):
            raise IndexError(f"a matrix of {count} rows does not have all of rows {numbers}")
        self._run(self._pointer, rows.data_ptr(), 0, rows.shape[0], out.data_ptr(), 1)


def dequantized(weight: Weight, first: int = 0, count: int | None = None) -> Tensor:
    """Rows [first, first + count) of the matrix in float32, by the C++ kernels."""
    weight = readable(weight)
    rows = weight.shape[0] - first if count is None else count
    out = torch.empty((rows, weight.shape[1]), device="cpu")
    matrix = _matrix(weight)
    _kernels().dequantize(ctypes.addressof(matrix), None, first, rows, out.data_ptr(), torch.get_num_threads())
    return out
