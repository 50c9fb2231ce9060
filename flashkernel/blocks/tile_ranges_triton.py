"""Kernels that make ranges of neighbouring tiles from their status, one program for each row of tiles."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashkernel.blocks.mask_type import EMPTY, FULL, PARTIAL

_EMPTY, _PARTIAL, _FULL = tl.constexpr(EMPTY), tl.constexpr(PARTIAL), tl.constexpr(FULL)


class TileMap(NamedTuple):
    """Status of tiles, int8 [maps, rows, tiles] with any strides."""

    status: Any
    rows: Any
    tiles: Any
    map_stride: Any
    row_stride: Any
    tile_stride: Any


@triton.jit
def load_status(tile_map, of_map, row, tile):
    """Status of tiles; EMPTY outside the map."""
    inside = (tile >= 0) & (tile < tile_map.tiles) & (row >= 0) & (row < tile_map.rows)
    offset = row.to(tl.int64) * tile_map.row_stride + tile.to(tl.int64) * tile_map.tile_stride
    return tl.load(tile_map.status + of_map.to(tl.int64) * tile_map.map_stride + offset, mask=inside, other=_EMPTY)


@triton.jit
def store_ranges(table, status, before, after, tile):
    """Stores the ranges of a row whose tiles have this status, beside the status of the tile before and after each.
    Returns their number. The first range is stored even if there is none: kernels read it before they know."""
    present = status != _EMPTY
    starts, ends = present & (status != before), present & (status != after)
    order = tl.cumsum(starts.to(tl.int32), 0) - 1
    tl.store(table + order * 3, tile, mask=starts)
    tl.store(table + order * 3 + 1, tile + 1, mask=ends)
    tl.store(table + order * 3 + 2, (status == _PARTIAL).to(tl.int32), mask=starts)
    count = tl.sum(starts.to(tl.int32), 0)
    column = tl.arange(0, 4)
    tl.store(table + column, column * 0, mask=(column < 3) & (count == 0))
    return count


@triton.jit
def _merged(status, tiles_present, any_partial, SHORT_ROW: tl.constexpr):
    """`merge_short_rows` of a row."""
    short = (tiles_present <= SHORT_ROW) & any_partial
    return tl.where(short & (status != _EMPTY), _PARTIAL, status)


# Sizes are no constants: other lengths need no other kernel.
SIZES = ("rows", "tiles", "map_stride", "row_stride", "tile_stride", "max_ranges", "work_tiles", "padding")


@triton.jit(do_not_specialize=SIZES[:6])
def mask_tile_ranges(
    status, rows, tiles, map_stride, row_stride, tile_stride, table, counts, max_ranges, SHORT_ROW: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """The ranges of each row of a `TileMap`; TILES is a power of two, as many as a row has or more."""
    tile_map = TileMap(status, rows, tiles, map_stride, row_stride, tile_stride)
    program = tl.program_id(0)
    of_map, row = program // tile_map.rows, program % tile_map.rows
    tile = tl.arange(0, TILES)
    own = load_status(tile_map, of_map, row, tile)
    present = tl.sum((own != _EMPTY).to(tl.int32), 0)
    partial = tl.sum((own == _PARTIAL).to(tl.int32), 0) > 0
    before = _merged(load_status(tile_map, of_map, row, tile - 1), present, partial, SHORT_ROW)
    after = _merged(load_status(tile_map, of_map, row, tile + 1), present, partial, SHORT_ROW)
    own = _merged(own, present, partial, SHORT_ROW)
    place = table + program.to(tl.int64) * max_ranges * 3
    tl.store(counts + program, store_ranges(place, own, before, after, tile))


@triton.jit
def _loaded(tile_map, of_map, first_row, tile, NUM_CONSUMERS: tl.constexpr):
    """Whether at least one consumer sees each tile."""
    found = tile < -1
    for w in tl.static_range(NUM_CONSUMERS):
        found = found | (load_status(tile_map, of_map, first_row + w, tile) != _EMPTY)
    return found


@triton.jit
def _visited(status, loaded, tile, first, last):
    """Status of the tiles that a consumer visits: of those loaded, from the first to the last that it sees."""
    seen = tl.where(status != _EMPTY, status, _PARTIAL)
    return tl.where(loaded & (tile >= first) & (tile <= last), seen, _EMPTY)


@triton.jit(do_not_specialize=SIZES)
def mask_block_ranges(
    status, rows, tiles, map_stride, row_stride, tile_stride, ranges, counts, loads, load_counts, work_tiles, padding,
    max_ranges, NUM_CONSUMERS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """`BlockRanges` of each work tile: rows of NUM_CONSUMERS consumers, the first of which has row -padding."""
    tile_map = TileMap(status, rows, tiles, map_stride, row_stride, tile_stride)
    program = tl.program_id(0)
    of_map = program // work_tiles
    first_row = program % work_tiles * NUM_CONSUMERS - padding
    tile = tl.arange(0, TILES)
    loaded = _loaded(tile_map, of_map, first_row, tile, NUM_CONSUMERS)
    loaded_before = _loaded(tile_map, of_map, first_row, tile - 1, NUM_CONSUMERS)
    loaded_after = _loaded(tile_map, of_map, first_row, tile + 1, NUM_CONSUMERS)
    place = loads + program.to(tl.int64) * max_ranges * 3
    found = store_ranges(
        place, tl.where(loaded, _FULL, _EMPTY), tl.where(loaded_before, _FULL, _EMPTY),
        tl.where(loaded_after, _FULL, _EMPTY), tile,
    )  # fmt: skip
    tl.store(load_counts + program, found)
    for w in tl.static_range(NUM_CONSUMERS):
        own = load_status(tile_map, of_map, first_row + w, tile)
        first = tl.min(tl.where(own != _EMPTY, tile, TILES), 0)
        last = tl.max(tl.where(own != _EMPTY, tile, -1), 0)
        before = load_status(tile_map, of_map, first_row + w, tile - 1)
        after = load_status(tile_map, of_map, first_row + w, tile + 1)
        consumer = program.to(tl.int64) * NUM_CONSUMERS + w
        store_ranges(
            ranges + consumer * max_ranges * 3, _visited(own, loaded, tile, first, last),
            _visited(before, loaded_before, tile - 1, first, last),
            _visited(after, loaded_after, tile + 1, first, last), tile,
        )  # fmt: skip
        # A consumer that sees nothing skips all loaded blocks before its first one.
        tl.store(counts + consumer * 3, tl.sum((loaded & (tile < first)).to(tl.int32), 0))
        tl.store(counts + consumer * 3 + 1, tl.sum((loaded & (tile >= first) & (tile <= last)).to(tl.int32), 0))
        tl.store(counts + consumer * 3 + 2, tl.sum((loaded & (tile > last) & (last >= 0)).to(tl.int32), 0))
