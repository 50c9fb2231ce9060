"""The formats "int4_tiles", "int8_tiles" and "mxfp4_tiles": the same values in the order in which Hopper's tensor cores
take them.

A tile is 64 rows by 64 columns of the matrix, contiguous in memory: 2 KB of 4-bit or 4 KB of 8-bit values. The tiles of
64 rows follow one another along the columns, so that rows from a multiple of 64 on are a slice of the tensor. In a
tile, a thread of a warpgroup (128 threads) has 16 bytes in one piece, the ones it multiplies (wgmma's left operand in
registers): with warp w = thread / 32, g = thread % 32 / 4 and t = thread % 4, rows 16 w + g + 8 h and columns
16 j + 8 c + 2 t + e, where h, c and e are 0 or 1 and j is 0 to 3.

- 4 bits: byte 4 j + 2 e + c of the thread's 16 has h = 0 in its low and h = 1 in its high four bits. As a 32-bit word,
  (word >> 4 (2 c + h)) & 0x000f000f are so the columns e = 0 and e = 1.
- 8 bits: two pieces of 16 bytes for each thread, 2 KB apart, of 32 columns each; byte 8 (j % 2) + 4 c + 2 e + h of
  piece j / 2. As a word, (word >> 8 h) & 0x00ff00ff are the columns e = 0 and e = 1.
- Scales (float16; e8m0 bytes of MXFP4) and zeros are in the same order: for each 64 rows, group after group, 64 values,
  that of row 16 w + g + 8 h at 16 w + 2 g + h.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flashkernel.blocks.integers import pack_nibbles, unpack_nibbles
from flashkernel.blocks.values import has_values
from flashkernel.blocks.weight import Layout, Weight, register_format
from flashkernel.blocks.weight_formats.grouped import GroupedFormat, scales_of
from flashkernel.blocks.weight_formats.int4 import Int4
from flashkernel.blocks.weight_formats.int8 import Int8
from flashkernel.blocks.weight_formats.mxfp4 import Mxfp4

TILE = 64  # rows, and columns
SUFFIX = "_tiles"
_ROWS, _COLUMNS = (4, 2, 8), (2, 2, 2, 4, 2)  # w, h, g; j / 2, j % 2, c, t, e


def _permuted(x: Tensor, sizes: Sequence[int], order: Sequence[int]) -> Tensor:
    """x reshaped to `sizes` after its leading dims, in another order of them."""
    lead = x.ndim - 2
    return x.reshape(*x.shape[:lead], *sizes).permute(*range(lead), *[lead + place for place in order])


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=lambda place: order[place])


#       row block, w, h, g, column block, j / 2, j % 2, c, t, e
_INT4 = (0, 4, 1, 3, 8, 5, 6, 9, 7, 2)
_INT8 = (0, 4, 5, 1, 3, 8, 6, 7, 9, 2)
_SCALES = (0, 4, 1, 3, 2)  # row block, w, h, g, group


def _sizes(rows: int, columns: int) -> tuple[int, ...]:
    return (rows // TILE, *_ROWS, columns // TILE, *_COLUMNS)


def tile_codes(codes: Tensor, order: Sequence[int]) -> Tensor:
    """Integers (..., rows, columns) in the order of tiles, of the same shape."""
    return _permuted(codes, _sizes(*codes.shape[-2:]), order).reshape(codes.shape)


def untile_codes(codes: Tensor, order: Sequence[int]) -> Tensor:
    """The inverse of `tile_codes`."""
    sizes = _sizes(*codes.shape[-2:])
    return _permuted(codes, [sizes[place] for place in order], _inverse(order)).reshape(codes.shape)


def tile_scales(values: Tensor) -> Tensor:
    """Scales or zeros (..., rows, groups) in the order of tiles, of the same shape."""
    rows, groups = values.shape[-2:]
    return _permuted(values, (rows // TILE, *_ROWS, groups), _SCALES).reshape(values.shape)


def untile_scales(values: Tensor) -> Tensor:
    """The inverse of `tile_scales`."""
    rows, groups = values.shape[-2:]
    sizes = (rows // TILE, *_ROWS, groups)
    return _permuted(values, [sizes[place] for place in _SCALES], _inverse(_SCALES)).reshape(values.shape)


class TiledFormat(GroupedFormat):
    """A format in tiles. `Weight.tiled` makes one of a matrix in the row-major format of the same values.

    Rows and columns of the matrix are multiples of 64. Groups have one row, and 32, 64 or a multiple of 128 columns, or
    the whole row. Scales are float16, rounded from float32; those of MXFP4 are the same.
    """

    def __init__(self, base: GroupedFormat, order: Sequence[int]) -> None:
        self.base, self.order = base, order
        self.name, self.data_dtype, self.packing = base.name + SUFFIX, base.data_dtype, base.packing
        self.scale_dtype = torch.uint8 if base.scale_dtype == torch.uint8 else torch.float16
        self.has_zeros = base.has_zeros

    def group_error(self, group: tuple[int, int], columns: int) -> str | None:
        if columns % TILE:
            return f"tiles have {TILE} columns, which do not divide {columns}; keep the weight in {self.base.name}"
        if group[0] != 1 or (group[1] not in (-1, 32, 64) and group[1] % 128):
            return f"tiles have groups of 32, 64 or a multiple of 128 columns of a row, not {group[0]}x{group[1]}"
        return self.base.group_error(group, columns)

    def error(self, weight: Weight) -> str | None:
        if weight.data.ndim >= 2 and weight.data.shape[-2] % TILE:
            return f"tiles have {TILE} rows, which do not divide {weight.data.shape[-2]}; keep it in {self.base.name}"
        return super().error(weight)

    def tiled(self, weight: Weight) -> Weight:
        """A Weight of the base format in tiles."""
        codes = unpack_nibbles(weight.data) if self.packing == 2 else weight.data
        if codes.shape[-2] % TILE:
            raise ValueError(f"Weight: {weight!r} has {codes.shape[-2]} rows, not a multiple of {TILE}; leave it so")
        reason = self.group_error(weight.group_shape, codes.shape[-1])
        if reason is not None:
            raise ValueError(f"Weight: {weight!r}: {reason}")
        if weight.activation_dtype is not None:
            raise ValueError(
                f"Weight: {weight!r} asks for x in 8 bits, and kernels of tiles take x as it is; leave it so"
            )
        data = tile_codes(codes, self.order)
        zeros = None if weight.zeros is None else tile_scales(weight.zeros)
        return Weight(
            pack_nibbles(data) if self.packing == 2 else data,
            tile_scales(self._narrow(scales_of(weight))), zeros, self.name, weight.group_shape,
        )  # fmt: skip

    def _narrow(self, scales: Tensor) -> Tensor:
        narrow = scales.to(self.scale_dtype)
        if self.scale_dtype == torch.uint8 or not has_values(scales):
            return narrow
        size = scales.abs()
        if bool(((size > 65504) | ((size < 2.0**-14) & (size > 0))).any()):
            raise ValueError(
                "Weight: tiles have float16 scales, and some scales lie outside 6.1e-5 to 65504; leave it as it is"
            )
        return narrow

    def row_major(self, weight: Weight) -> Weight:
        """The Weight in the base format."""
        codes = unpack_nibbles(weight.data) if self.packing == 2 else weight.data
        data = untile_codes(codes, self.order)
        zeros = None if weight.zeros is None else untile_scales(weight.zeros)
        return Weight(
            pack_nibbles(data) if self.packing == 2 else data,
            untile_scales(scales_of(weight)).to(self.base.scale_dtype), zeros, self.base.name, weight.group_shape,
        )  # fmt: skip

    def dequantize(self, weight: Weight, dtype: torch.dtype) -> Tensor:
        return self.row_major(weight).dequantize(dtype)

    def default_group(self, columns: int) -> tuple[int, int]:
        return self.base.default_group(columns)

    def quantize(self, tensor: Tensor, group_shape: tuple[int, int], symmetric: bool) -> Weight:
        return self.tiled(self.base.quantize(tensor, group_shape, symmetric))

    def pack(self, data: Tensor, scales: Tensor | None, zeros: Tensor | None) -> Weight:
        return self.tiled(self.base.pack(data, scales, zeros))

    def rows(self, weight: Weight, rows: slice) -> Weight:
        start, stop, step = rows.indices(weight.data.shape[-2])
        if step == 1 and start % TILE == 0 and stop % TILE == 0:
            parts = [None if one is None else one[..., start:stop, :] for one in (weight.scales, weight.zeros)]
            return replace(weight, data=weight.data[..., start:stop, :], scales=parts[0], zeros=parts[1])
        return self.base.rows(self.row_major(weight), rows)

    def declines(self, backend: str, layout: Layout) -> str | None:
        if backend != "hopper":
            return f"its kernels read rows, not {self.name}"
        return None


def tiled_format(weight: Weight) -> TiledFormat:
    """The format of a weight's tiles; ValueError if its format has none."""
    name = weight.format + SUFFIX
    if name not in FORMATS:
        raise ValueError(f"Weight: {weight.format} has no tiles; {', '.join(FORMATS)} are the formats in tiles")
    return FORMATS[name]


FORMATS = {made.name: made for made in (TiledFormat(Int4(), _INT4), TiledFormat(Int8(), _INT8),
                                        TiledFormat(Mxfp4(), _INT4))}  # fmt: skip
for _made in FORMATS.values():
    register_format(_made)
