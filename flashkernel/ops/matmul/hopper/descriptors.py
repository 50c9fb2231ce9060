"""TMA descriptors of the Hopper matrix product."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flashkernel.core.gluon import descriptor_fields, gl, make_descriptor

GLUON_DTYPES = {
    torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32,
    torch.float8_e4m3fn: gl.float8e4nv, torch.int8: gl.int8,
}  # fmt: skip


def tma_compatible(x: Tensor) -> bool:
    """True if TMA takes x [batch, rows, columns] as it is: columns side by side, addresses multiples of 16 bytes."""
    unit = 16 // x.element_size()
    if (x.stride(2) != 1 and x.shape[2] != 1) or x.data_ptr() % 16:
        return False
    return all(size == 1 or (stride > 0 and stride % unit == 0) for size, stride in zip(x.shape[:2], x.stride()))


def padded_empty(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns an uninitialized tensor whose rows are multiples of 16 bytes apart."""
    unit = 16 // dtype.itemsize
    padded = -(-shape[2] // unit) * unit
    return torch.empty((*shape[:2], padded), dtype=dtype, device=device)[:, :, : shape[2]]


def load_operand(x: Tensor, rows_dim: int, k_major_only: bool) -> tuple[Tensor, bool]:
    """Returns (view [batch, outer, inner] that TMA can load, True if K is its inner index) of an operand.

    Args:
        x: [batch, M, K] or [batch, K, N].
        rows_dim: The dim of M or N, 1 or 2.
        k_major_only: WGMMA takes operands in the other order if they have 16 bits.

    An operand that TMA cannot load in either order is copied.
    """
    k_major = x if rows_dim == 1 else x.transpose(1, 2)
    if tma_compatible(k_major):
        return k_major, True
    mn_major = k_major.transpose(1, 2)
    if not k_major_only and tma_compatible(mn_major):
        return mn_major, False
    batch, rows, inner = k_major.shape
    copy = padded_empty((batch, rows, inner), x.dtype, x.device)
    copy.copy_(k_major)
    return copy, True


def tile_descriptor(x: Tensor, box: tuple[int, int]) -> Any:
    """Returns the TMA descriptor of x [batch, rows, columns] for tiles of `box` = (rows, columns)."""
    unit = 16 // x.element_size()
    legal = -(-x.shape[2] // unit) * unit  # TMA never follows the stride of a dim of size 1, but it must be a legal one
    strides = [stride if size > 1 else legal for size, stride in zip(x.shape, x.stride())]
    strides[2] = 1
    return make_descriptor(_tile_fields(box, x.dtype), x, x.shape, strides)


@lru_cache(maxsize=256)
def _tile_fields(box: tuple[int, int], dtype: torch.dtype) -> dict[str, Any]:
    shape = [1, *box]
    layout = gl.NVMMASharedLayout.get_default_for(shape, GLUON_DTYPES[dtype])
    return descriptor_fields(torch.empty(shape, dtype=dtype, device="meta"), shape, layout)
