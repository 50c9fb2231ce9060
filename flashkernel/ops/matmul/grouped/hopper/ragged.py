"""TMA descriptors of rows in groups: a tile ends where its group ends, wherever that is.

TMA checks each coordinate of a tile against the size of its dim. A group ends inside the tensor, where no dim of it
ends, so the descriptor [LARGE, LARGE, ROW_LIMIT, columns] gives the rows a dim that ends with every group. With a row
stride of s elements its strides are [2^34 - s, s, s, 1], and row r of the group [begin, end) is at the coordinates

    (ROW_LIMIT, end, ROW_LIMIT - (end - begin) + r)      ROW_LIMIT = 2^30

whose address is 2^30 (2^34 - s) + end s + (2^30 - end + begin + r) s = (begin + r) s + 2^64: addresses are modulo 2^64.
The third coordinate reaches ROW_LIMIT, and so leaves its dim, at the first row behind the group. Such rows read as
zero and are not stored.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flashkernel.core.gluon import descriptor_fields, gl, gluon, make_descriptor
from flashkernel.ops.matmul.hopper.descriptors import GLUON_DTYPES

ROW_LIMIT = gl.constexpr(1 << 30)
_LARGE = 0x7FFF0000  # no tile reaches it


def ragged_descriptor(x: Tensor, box: tuple[int, int]) -> Any:
    """Returns the descriptor of x [rows, columns] for tiles of `box` = (rows, columns). TMA must take x's strides."""
    unit = 16 // x.element_size()
    stride = x.stride(0) if x.shape[0] > 1 else -(-x.shape[1] // unit) * unit
    shape = [_LARGE, _LARGE, 1 << 30, x.shape[1]]
    return make_descriptor(_fields(box, x.dtype), x, shape, [(1 << 34) - stride, stride, stride, 1])


@lru_cache(maxsize=256)
def _fields(box: tuple[int, int], dtype: torch.dtype) -> dict[str, Any]:
    shape = [1, 1, *box]
    layout = gl.NVMMASharedLayout.get_default_for(shape, GLUON_DTYPES[dtype])
    return descriptor_fields(torch.empty(shape, dtype=dtype, device="meta"), shape, layout)


@gluon.jit
def group_place(row, column, end):
    """Returns the coordinates of a tile whose first element is (row, column), of a group that ends at row `end`."""
    return [ROW_LIMIT, end, ROW_LIMIT - end + row, column]
