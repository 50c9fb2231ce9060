"""Device functions of matrix product kernels: the tile order, and tiles loaded by TMA or by pointers."""

import triton
import triton.language as tl


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
    matrix, descriptor, batch, first_row, first_column, rows, columns, row_stride, column_stride,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, MASK_ROWS: tl.constexpr, MASK_COLUMNS: tl.constexpr,
    TMA: tl.constexpr, BATCHED: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """The tile [BLOCK_ROWS, BLOCK_COLUMNS] at (first_row, first_column) of a matrix; zero outside of it.

    With TMA it comes from a descriptor, which sees the matrix transposed where TRANSPOSED, and has a dim for the batch
    where BATCHED. Else `matrix` points to the first element of the batch's matrix.
    """
    if TMA:
        if TRANSPOSED:
            if BATCHED:
                tile = descriptor.load([batch, first_column, first_row]).reshape([BLOCK_COLUMNS, BLOCK_ROWS])
            else:
                tile = descriptor.load([first_column, first_row])
            return tile.T
        else:
            if BATCHED:
                return descriptor.load([batch, first_row, first_column]).reshape([BLOCK_ROWS, BLOCK_COLUMNS])
            else:
                return descriptor.load([first_row, first_column])
    else:
        row = first_row + tl.arange(0, BLOCK_ROWS)
        column = first_column + tl.arange(0, BLOCK_COLUMNS)
        pointers = matrix + row.to(tl.int64)[:, None] * row_stride + column.to(tl.int64)[None, :] * column_stride
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
