"""The format "int4": 4-bit integers by group, two to a byte."""

from __future__ import annotations

import torch
from torch import Tensor

from flashkernel.blocks.integers import INT4, pack_nibbles, unpack_nibbles
from flashkernel.blocks.weight import GRANULARITIES, register_format
from flashkernel.blocks.weight_formats.int8 import IntegerFormat

GROUPS = (128, 64, 32)  # columns of a group that kernels are asked to read, beside whole rows


class Int4(IntegerFormat):
    """4-bit integers with float32 scales for groups of a row, of 32, 64 or 128 columns, or for whole rows.

    data is uint8 (out, in / 2), row-major. Byte (i, j) has column 2j of row i in its low four bits and column 2j + 1 in
    its high four bits, each as an unsigned integer q from 0 to 15. A 32-bit little-endian word of a row is so eight
    consecutive columns, the first in the lowest bits. scales are (out, in / columns), one row of the matrix after the
    other.

    Symmetric: element (i, j) = (q - 8) * scales[i, j // columns]; `Weight.quantize` stores q from 1 to 15. Asymmetric:
    zeros are uint8, one byte each, of the scales' shape, and element (i, j) = (q - zeros[i, j // columns]) *
    scales[i, j // columns].

    in is even, and a multiple of the columns of a group: no group is cut off at the end of a row.
    """

    name = "int4"
    data_dtype = torch.uint8
    packing = 2
    activation_dtypes = (torch.int8,)
    numbers = INT4

    def store(self, codes: Tensor) -> Tensor:
        return pack_nibbles(codes)

    def codes(self, data: Tensor) -> Tensor:
        return unpack_nibbles(data)

    def group_error(self, group: tuple[int, int], columns: int) -> str | None:
        if columns % 2:
            return f"int4 stores two columns in a byte, and the matrix has {columns}; add one of zeros, or use int8"
        if group[0] != 1:
            return f"int4 has scales for groups of a row, or whole rows, not for {group[0]}x{group[1]}"
        if group[1] != -1 and columns % group[1]:
            fitting = [str(size) for size in GROUPS if columns % size == 0]
            also = f"1x{', 1x'.join(fitting)} or row" if fitting else "row"
            return f"groups of {group[1]} columns do not divide {columns}; take {also}"
        return None

    def default_group(self, columns: int) -> tuple[int, int]:
        return next(((1, size) for size in GROUPS if columns % size == 0), GRANULARITIES["row"])


register_format(Int4())
