"""TMA descriptors of matrices, where the GPU and the strides allow them.

A descriptor's last dim has unit stride; the others lie a multiple of 16 bytes apart. A matrix that is contiguous along
its first dim is described transposed. Elements outside a matrix read as zero and are not stored, also between the
matrices of a batch, which is a dim of its own.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashkernel.core import device

ALIGNMENT = 16  # bytes


def transposed(x: Tensor) -> bool:
    """Whether a matrix [..., rows, columns] is contiguous along its rows' dim instead of its columns'."""
    return x.stride(-1) != 1 and x.stride(-2) == 1


def aligned(x: Tensor) -> bool:
    """Whether threads can load 16 bytes at a time: one dim has unit stride, the others multiples of 16 bytes."""
    if x.stride(-1) != 1 != x.stride(-2) or x.data_ptr() % ALIGNMENT:
        return False
    inner = x.ndim - (2 if transposed(x) else 1)
    return all(stride * x.element_size() % ALIGNMENT == 0 for dim, stride in enumerate(x.stride()) if dim != inner)


def describable(x: Tensor) -> bool:
    """Whether TMA can load tiles of x [..., rows, columns], as it is or transposed.

    A float32 output tile of 128 x 256 would not fit into shared memory beside the operands.
    """
    props = device.properties(x.device)
    if not (props.arch >= 90 or props.kind == "cpu") or x.element_size() > 2 or x.numel() == 0:
        return False
    return aligned(x) and 0 not in x.stride()


def describable_from_any_row(x: Tensor) -> bool:
    """As `describable`, for tiles that may begin at any row, as those of groups do.

    TMA takes every coordinate; Triton's interpreter refuses those of the last dim within 16 bytes.
    """
    return describable(x) and not (transposed(x) and device.properties(x.device).kind == "cpu")


def describe(x: Tensor, rows: int, columns: int) -> Any:
    """The descriptor of x [rows, columns] or [batch, rows, columns], whose tiles are rows x columns."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    block = [1] * (x.ndim - 2) + [rows, columns]
    if transposed(x):
        x = x.transpose(-1, -2)
        block[-1], block[-2] = block[-2], block[-1]
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block)


def batch_strides(x: Tensor) -> tuple[int, int, int]:
    """Strides of [batch or 1, rows, columns]; a batch of one is the same for all."""
    return (0 if x.shape[0] == 1 else x.stride(0), x.stride(1), x.stride(2))


def precision(x: Tensor, tf32: bool) -> str:
    """How float32 operands are multiplied: in one tf32 product, or in three, as exact as float32."""
    return "tf32x3" if x.element_size() == 4 and not tf32 else "tf32"
