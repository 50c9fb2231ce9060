"""Device functions of matrix product kernels: the tile order, and tiles loaded by TMA or by pointers."""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class TileAccess(NamedTuple):
    """How tiles of an operand are loaded: what a kernel is compiled for."""

    TMA: bool  # by a descriptor, else by pointers
    BATCHED: bool  # the descriptor has a dim for the batch
    TRANSPOSED: bool  # the descriptor sees the matrix transposed


class Operand(NamedTuple):
    """A matrix that tiles are loaded from, inside a kernel."""

    matrix: Any  # pointer to the first element of the batch's matrix; not read with TMA
    descriptor: Any
    row_stride: Any
    column_stride: Any


@triton.jit
def tile_position(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """(tile_m, tile_n) of the tile-th tile: GROUP_M rows of tiles at a time, column by column.

    Tiles that run at the same time then share their tiles of A and B in the L2 cache.
    """
    width = GROUP_M * tiles_n
    band = tile // width
    first_m = band * GROUP_M
    height = tl.minimum(tiles_m - first_m, GROUP_M)
    within = tile - band * width
    return first_m + within % height, within // height


@triton.jit
def load_tile(
    operand, batch, first_row, first_column, rows, columns, ACCESS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, MASK_ROWS: tl.constexpr, MASK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """The tile [BLOCK_ROWS, BLOCK_COLUMNS] at (first_row, first_column) of an `Operand`; zero outside of it.

    ACCESS is a `TileAccess`. TMA knows the bounds; pointers are masked along the rows and columns that may end within
    the tile.
    """
    descriptor = operand.descriptor
    if ACCESS.TMA:
        if ACCESS.TRANSPOSED:
            if ACCESS.BATCHED:
                tile = descriptor.load([batch, first_column, first_row]).reshape([BLOCK_COLUMNS, BLOCK_ROWS])
            else:
                tile = descriptor.load([first_column, first_row])
            return tile.T
        else:
            if ACCESS.BATCHED:
                return descriptor.load([batch, first_row, first_column]).reshape([BLOCK_ROWS, BLOCK_COLUMNS])
            else:
                return descriptor.load([first_row, first_column])
    else:
        row = first_row + tl.arange(0, BLOCK_ROWS)
        column = first_column + tl.arange(0, BLOCK_COLUMNS)
        rows_offset = row.to(tl.int64)[:, None] * operand.row_stride
        pointers = operand.matrix + rows_offset + column.to(tl.int64)[None, :] * operand.column_stride
        if MASK_ROWS:
            if MASK_COLUMNS:
                return tl.load(pointers, mask=(row < rows)[:, None] & (column < columns)[None, :], other=0.0)
            else:
                return tl.load(pointers, mask=(row < rows)[:, None], other=0.0)
        else:
            if MASK_COLUMNS:
                return tl.load(pointers, mask=(column < columns)[None, :], other=0.0)
            else:
                return tl.load(pointers)
