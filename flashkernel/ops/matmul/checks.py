"""Checks of the arguments of dense matrix products."""

from __future__ import annotations

import torch
from torch import Tensor

from flashkernel.blocks.epilogue import Activation, Gate, activation_width, check_activation
from flashkernel.blocks.fp8 import FP8, SCALE_BLOCK
from flashkernel.blocks.gate_up import PACKINGS
from flashkernel.core.arguments import check_written, is_float, needs_gradients
from flashkernel.ops.matmul.reference import as_matrices

QUANTIZATIONS = ("block", "row")


def operands(function: str, a: Tensor, *matrices: Tensor) -> int | None:
    """The batch of the output; None for a matrix."""
    if not matrices:
        raise ValueError(f"{function}: b is an empty list; give a matrix, or a pair of gate and up")
    if not is_float(a) and a.dtype not in (FP8, torch.int8):
        raise ValueError(f"{function}: a is {a.dtype}; it must be float of 16 bits or more, float8_e4m3fn or int8")
    for b in matrices:
        if a.ndim not in (2, 3) or b.ndim not in (2, 3):
            raise ValueError(f"{function}: a is {tuple(a.shape)} and b {tuple(b.shape)}; they must have 2 or 3 dims")
        if a.shape[-1] != b.shape[-2]:
            raise ValueError(
                f"{function}: a is {tuple(a.shape)} and b {tuple(b.shape)}; the last size of a must be b's last but one"
            )
        if a.dtype != b.dtype or a.device != b.device:
            raise ValueError(
                f"{function}: a is {a.dtype} on {a.device}, b is {b.dtype} on {b.device}; convert one of them"
            )
    if matrices[0].shape != matrices[-1].shape:
        raise ValueError(
            f"{function}: the gate's matrix is {tuple(matrices[0].shape)} and up's {tuple(matrices[-1].shape)}; they "
            "must have one shape"
        )
    b = matrices[0]
    if a.ndim == 2 and b.ndim == 2:
        return None
    left, right = a.shape[0] if a.ndim == 3 else 1, b.shape[0] if b.ndim == 3 else 1
    if left != right and 1 not in (left, right):
        raise ValueError(f"{function}: a has a batch of {left} and b of {right}; they must be equal, or one of them 1")
    return right if left == 1 else left


def columns(
    function: str, matrices: tuple[Tensor, ...], activation: str | Activation | Gate | None, packed: str
) -> int:
    """The columns of the output."""
    check_activation(function, activation)
    if packed not in PACKINGS:
        raise ValueError(f"{function}: packed is {packed!r}; it must be 'halves' or 'interleaved'")
    gated, size = activation_width(activation) == 2, matrices[0].shape[-1]
    if len(matrices) != 1 and (len(matrices) != 2 or not gated):
        raise ValueError(
            f"{function}: b is a list of {len(matrices)} matrices; it may be one, or with a gated activation a pair of "
            "gate and up"
        )
    if gated and len(matrices) == 1:
        if size % 2:
            raise ValueError(f"{function}: b holds gate and up and needs an even number of columns, not {size}")
        return size // 2
    return size


def extras(
    a: Tensor, batch: int | None, n: int, matrices: tuple[Tensor, ...], biases: tuple[Tensor, ...],
    residual: Tensor | None, out_dtype: torch.dtype | None,
) -> None:  # fmt: skip
    """The bias, the residual and the output's dtype of `matmul`."""
    if out_dtype is not None and not out_dtype.is_floating_point:
        raise ValueError(f"matmul: out_dtype is {out_dtype}; it must be a float dtype")
    if biases and len(biases) != len(matrices):
        raise ValueError(f"matmul: {len(biases)} biases for {len(matrices)} matrices; give each of b one, or none")
    for bias, matrix in zip(biases, matrices):
        size = matrix.shape[-1]
        if bias.ndim != 1 or bias.shape[0] != size or not is_float(bias) or bias.device != a.device:
            raise ValueError(
                f"matmul: bias is {bias.dtype} {tuple(bias.shape)} on {bias.device}; it must be float ({size},) on "
                f"{a.device}"
            )
    if residual is not None:
        m = a.shape[-2]
        shapes = [(m, n)] if batch is None else [(m, n), (1, m, n), (batch, m, n)]
        if (
            tuple(residual.shape) not in shapes
            or not is_float(residual)
            or residual.device != a.device
        ):  # fmt: skip
            raise ValueError(
                f"matmul: residual is {residual.dtype} {tuple(residual.shape)} on {residual.device}; it must be float "
                f"{' or '.join(map(str, shapes))} on {a.device}"
            )


def quantization(
    a: Tensor, batch: int | None, out_dtype: torch.dtype, out_scale: Tensor | None, out_quantize: str | None,
    out: Tensor | None,
) -> Tensor | None:  # fmt: skip
    """The scale of an fp8 output, with 2 or 3 dims."""
    if out_quantize is not None:
        if out_quantize not in QUANTIZATIONS:
            raise ValueError(f"matmul: out_quantize is {out_quantize!r}; it must be 'block' or 'row'")
        if out_dtype != FP8 or out_scale is not None or out is not None:
            raise ValueError("matmul: out_quantize makes a new float8_e4m3fn output; leave out_scale and out away")
    if out_scale is None:
        return None
    if out_dtype != FP8:
        raise ValueError(f"matmul: out_scale is for an output in float8_e4m3fn, not {out_dtype}; use `scale`")
    m = a.shape[-2]
    shapes = [(), (1,), (1, 1), (m, 1)] + (
        [] if batch is None else [(1, 1, 1), (1, m, 1), (batch, 1, 1), (batch, m, 1)]
    )
    if tuple(out_scale.shape) not in shapes or out_scale.dtype != torch.float32 or out_scale.device != a.device:
        raise ValueError(
            f"matmul: out_scale is {out_scale.dtype} {tuple(out_scale.shape)} on {out_scale.device}; it must be "
            f"float32 {' or '.join(map(str, shapes))} on {a.device}"
        )
    return out_scale.reshape(1, 1) if out_scale.ndim < 2 else out_scale


def output(
    function: str, name: str, given: Tensor, dtype: torch.dtype, shape: tuple[int, ...], *inputs: Tensor | None,
    in_place: Tensor | None,
) -> None:  # fmt: skip
    """A tensor that a product of `inputs` is written to; it may be `in_place`, which is read element by element."""
    if tuple(given.shape) != shape or given.dtype != dtype or given.device != inputs[0].device:  # type: ignore[union-attr]
        raise ValueError(
            f"{function}: {name} is {given.dtype} {tuple(given.shape)} on {given.device}; the result is {dtype} "
            f"{shape} on {inputs[0].device}"  # type: ignore[union-attr]
        )
    check_written(function, name, given, *inputs, in_place=(in_place,))
    if needs_gradients(*inputs, in_place):
        raise ValueError(f"{function}: {name} takes no gradients; call it under torch.no_grad(), or leave {name} away")


def preactivation(
    a: Tensor, b: Tensor, batch: int | None, z: Tensor, activation: str | Activation | Gate
) -> int:  # fmt: skip
    """The columns of z for each of the product's, 1 or 2."""
    check_activation("matmul_dact", activation)
    if activation is None:
        raise ValueError("matmul_dact: activation is None; without one the product alone is the gradient: use matmul")
    if not is_float(a):
        raise ValueError(f"matmul_dact: a is {a.dtype}; it must be float of 16 bits or more")
    width = activation_width(activation)
    shape = (a.shape[-2], width * b.shape[-1]) if batch is None else (batch, a.shape[-2], width * b.shape[-1])
    if tuple(z.shape) != shape or not is_float(z) or z.device != a.device:
        raise ValueError(
            f"matmul_dact: preactivation is {z.dtype} {tuple(z.shape)} on {z.device}; it must be float of 16 bits or "
            f"more, {shape}, on {a.device}"
        )
    return width


def scales(
    a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None
) -> tuple[Tensor | None, Tensor | None, str]:
    """Scales of 2 or 3 dims, and how they multiply: "", "row" or "block" (`MatmulParams.scaling`)."""
    if (a_scale is None) != (b_scale is None):
        raise ValueError("matmul: give both a_scale and b_scale, or neither; a scale of 1 is torch.ones(())")
    if a_scale is None or b_scale is None:
        if a.dtype == torch.int8:
            raise ValueError("matmul: int8 operands need a_scale and b_scale")
        return None, None, ""
    if a.dtype.itemsize > 1:
        raise ValueError(f"matmul: scales are for 8-bit operands; a is {a.dtype}: multiply it, or use `scale`")
    for name, given in (("a_scale", a_scale), ("b_scale", b_scale)):
        if given.dtype != torch.float32 or given.device != a.device or given.ndim > 3:
            raise ValueError(
                f"matmul: {name} is {given.dtype} {tuple(given.shape)} on {given.device}; it must be float32 of up "
                f"to 3 dims on {a.device}"
            )
    a_scale, b_scale = as_matrices(a_scale, b_scale)
    (m, k), n = a.shape[-2:], b.shape[-1]
    blocks_k, blocks_n = -(-k // SCALE_BLOCK), -(-n // SCALE_BLOCK)
    batches = [(1,), (a.shape[0] if a.ndim == 3 else 1,), (b.shape[0] if b.ndim == 3 else 1,)]
    fits = tuple(a_scale.shape[:-2]) in [(), *batches[:2]] and tuple(b_scale.shape[:-2]) in [(), (1,), batches[2]]
    left, right = tuple(a_scale.shape[-2:]), tuple(b_scale.shape[-2:])
    if fits and left in ((1, 1), (m, 1)) and right in ((1, 1), (1, n)):
        return a_scale, b_scale, "row"
    if fits and left == (m, blocks_k) and right == (blocks_k, blocks_n):
        return a_scale, b_scale, "block"
    raise ValueError(
        f"matmul: a_scale is {tuple(a_scale.shape)} and b_scale {tuple(b_scale.shape)} for a {tuple(a.shape)} and b "
        f"{tuple(b.shape)}; they must be (1, 1) or ({m}, 1) with (1, 1) or (1, {n}), or blocks: ({m}, {blocks_k}) with "
        f"({blocks_k}, {blocks_n})"
    )
