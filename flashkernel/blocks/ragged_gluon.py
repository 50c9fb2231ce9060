"""TMA descriptors of rows in groups (of a grouped product, or packed sequences): a tile ends where its group ends.

TMA checks each coordinate of a tile against the size of its dim. A group ends inside the tensor, where no dim of it
ends, so the descriptor [LARGE, LARGE, ROW_LIMIT, columns] gives the rows a dim that ends with every group. With a row
stride of s elements its strides are [2^34 - s, s, s, 1], and row r of the group [begin, end) is at the coordinates

    (ROW_LIMIT, end, ROW_LIMIT - (end - begin) + r)      ROW_LIMIT = 2^30

whose address is 2^30 (2^34 - s) + end s + (2^30 - end + begin + r) s = (begin + r) s + 2^64: addresses are modulo 2^64.
The third coordinate reaches ROW_LIMIT, and so leaves its dim, at the first row behind the group. Such rows read as
zero and are not stored. Dims behind the rows, such as heads, keep their coordinates.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flashkernel.core.gluon import descriptor_fields, gl, gluon, make_descriptor

ROW_LIMIT = gl.constexpr(1 << 30)
_LARGE = 0x7FFF0000  # no tile reaches it


def ragged_descriptor(x: Tensor, box: tuple[int, ...]) -> Any:
    """Returns the descriptor of x [rows, ..., columns] for tiles of `box`. TMA must take x's strides."""
    unit = 16 // x.element_size()
    columns = -(-x.shape[-1] // unit) * unit
    # TMA never follows the stride of a dim of size 1, but it must be a legal one.
    strides = [stride if size > 1 else columns for size, stride in zip(x.shape[:-1], x.stride())]
    shape = [_LARGE, _LARGE, 1 << 30, *x.shape[1:]]
    return make_descriptor(_fields(box, x.dtype), x, shape, [(1 << 34) - strides[0], strides[0], *strides, 1])


@lru_cache(maxsize=256)
def _fields(box: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    shape = [1, 1, *box]
    layout = gl.NVMMASharedLayout.get_default_for(shape, getattr(gl, str(dtype).removeprefix("torch.")))
    return descriptor_fields(torch.empty(shape, dtype=dtype, device="meta"), shape, layout)


@gluon.jit
def group_coords(row, column, end):
    """Returns the coordinates of a tile whose first element is (row, column), of a group that ends at row `end`."""
    return [ROW_LIMIT, end, ROW_LIMIT - end + row, column]


@gluon.jit
def head_coords(row, head, end):
    """Returns the coordinates of a tile [rows, heads, head_dim] whose first row is `row`, of a group that ends at row
    `end`."""
    return [ROW_LIMIT, end, ROW_LIMIT - end + row, head, 0]
