"""TMA descriptors of the Hopper attention kernels."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flashkernel.core.gluon import descriptor_fields, gl, make_descriptor
from flashkernel.core.tune import head_block as block


def tile_descriptor(x: Tensor, box: tuple[int, int]) -> Any:
    """Returns the TMA descriptor of x (batch, seqlen, heads, head_dim) for tiles of `box` = (positions, heads).
    Elements outside x read as zero."""
    x = tma_compatible(x)
    shape = x.shape
    # TMA never follows the stride of a dim of size 1, but it must be a legal one.
    strides = [stride if size > 1 else shape[3] for size, stride in zip(shape, x.stride())]
    strides[3] = 1
    return make_descriptor(_tile_fields(box, shape[3], x.dtype), x, shape, strides)


def vector_descriptor(x: Tensor, count: int) -> Any:
    """Returns the TMA descriptor of a contiguous float32 tensor seen as a vector, for tiles of `count` elements."""
    return make_descriptor(_vector_fields(count), x, [x.numel()], [1])


def reduce_descriptor(x: Tensor) -> Any:
    """Returns the TMA descriptor of a float32 tensor seen as a matrix, for tiles of 64 rows: for TMA reductions."""
    rows = x.view(-1, x.shape[-1])
    return make_descriptor(_reduce_fields(rows.shape[1]), rows, rows.shape, list(rows.stride()))


@lru_cache(maxsize=256)
def _reduce_fields(width: int) -> dict[str, Any]:
    layout = gl.NVMMASharedLayout.get_default_for([64, width], gl.float32)
    return descriptor_fields(torch.empty((64, width), dtype=torch.float32, device="meta"), [64, width], layout)


@lru_cache(maxsize=256)
def _tile_fields(box: tuple[int, int], head_dim: int, dtype: torch.dtype) -> dict[str, Any]:
    shape = [1, *box, block(head_dim)]
    layout = gl.NVMMASharedLayout.get_default_for(shape, gl.bfloat16 if dtype == torch.bfloat16 else gl.float16)
    like = torch.empty(shape, dtype=dtype, device="meta")
    return descriptor_fields(like, shape, layout)


@lru_cache(maxsize=256)
def _vector_fields(count: int) -> dict[str, Any]:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    like = torch.empty(count, dtype=torch.float32, device="meta")
    return descriptor_fields(like, [count], layout)


def tma_compatible(x: Tensor) -> Tensor:
    """Returns x, copied if TMA cannot load it: address and strides must be multiples of 16 bytes."""
    unit = 16 // x.element_size()
    if x.data_ptr() % 16 == 0:
        for size, stride in zip(x.shape[:3], x.stride()):
            if size > 1 and (stride % unit or not stride):
                break
        else:
            return x
    return x.clone(memory_format=torch.contiguous_format)
