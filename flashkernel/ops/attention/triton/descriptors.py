"""Tiles of q, k, v and do are loaded by TMA descriptors where the GPU and the strides allow, else by pointers.

A descriptor sees a tensor (batch, sequence, heads, head_dim) as a matrix whose rows lie one position of the sequence
apart. Batches are further down; heads are further down as well, or side by side in the columns.

The TMA unit wants the matrix to begin at a multiple of 16 bytes and its rows to lie a multiple of 16 bytes apart. A
tile may begin at any row and column; what it has outside the matrix reads as zero, but what it has of a neighboring
sequence or head does not. Heads that begin at odd columns, and rows of less than 64 bytes, are left to pointers: they
are rare, gain nothing by it, and make the compiler take other paths than all other tiles.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashkernel.core import device, tune

ALIGNMENT = 16  # bytes: of a descriptor's first element, its rows, and the heads in them
MIN_ROW_BYTES = 64  # bytes of a tile's row


def tile_sources(*tiled: tuple[Tensor, int]) -> tuple[list[Any], bool]:
    """(descriptors, True), or (the tensors themselves, False) where one of them cannot be described.

    Args:
        tiled: pairs of a tensor and the rows of its tiles.
    """
    if _can_describe(tiled[0][0]):
        described = [_describe(x, rows) for x, rows in tiled]
        if None not in described:
            return described, True
    return [x for x, _ in tiled], False


def _can_describe(x: Tensor) -> bool:
    props = device.properties(x.device)
    return x.element_size() == 2 and (props.arch >= 90 or props.kind == "cpu")


def _describe(x: Tensor, rows: int) -> Any:
    """None where tiles of the matrix would not be those of the tensor."""
    batch, seqlen, heads, width = x.shape
    size = x.element_size()
    batch_stride, stride, head_stride, _ = x.stride()
    beside = heads == 1 or (heads - 1) * head_stride + width <= stride  # all heads of a position are in its row
    whole = (
        x.numel() > 0
        and width == tune.power_of_2(width)
        and width * size >= MIN_ROW_BYTES
        and stride >= width
        and stride * size % ALIGNMENT == 0
        and (heads == 1 or head_stride * size % ALIGNMENT == 0)
        and x.data_ptr() % ALIGNMENT == 0
        and (batch == 1 or batch_stride % stride == 0)
        and (beside or head_stride % stride == 0)
        # A tile may go on beyond the sequence only where nothing follows: it gets zeros there.
        and (seqlen % rows == 0 or (batch == 1 and beside))
    )
    if not whole:
        return None
    from triton.tools.tensor_descriptor import TensorDescriptor

    last = (batch - 1) * batch_stride + (0 if beside else (heads - 1) * head_stride)  # where the last matrix begins
    columns = (heads - 1) * head_stride + width if beside else width
    return TensorDescriptor(x, [last // stride + seqlen, columns], [stride, 1], [rows, width])
