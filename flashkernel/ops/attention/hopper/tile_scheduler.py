"""Tile scheduler of the Hopper kernels: which work tiles each persistent program takes, and in which order.

A work tile is a tile of queries of one head, or of the heads packed together (pack_gqa); in the backward kernels, a
tile of keys of one kv head. The schedule is computed once, on the host: longest work tile first, each to the program
that is free first. Work tiles are sorted within one head group at a time, as many heads as fit their K and V into L2
(FlashAttention-3's L2 swizzle). The last head groups may be sorted as one, so that short work tiles come last.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flashkernel.blocks.mask import Mask
from flashkernel.core.tables import DeviceTables
from flashkernel.ops.attention.hopper.block_ranges import MAX_CACHED, BlockRanges

_WORK_TILE_COST = 1.0  # of a work tile's prologue and epilogue, in K blocks
_MAX_MERGED_GROUPS = 3  # so many of the last head groups are tried as one
_MAX_TILES_TO_TRY = 4096  # with more work tiles the programs are nearly even already, and trying takes its time

_cache: DeviceTables[Tensor] = DeviceTables(MAX_CACHED)


@dataclass(frozen=True)
class TileGrid:
    """All work tiles of a call.

    Attributes:
        batch_heads: batch * heads_per_batch.
        tiles_per_head: work tiles of a head (or of the heads packed together).
        heads_per_batch: heads of a batch entry; heads // pack_gqa if heads are packed, kv heads if `transposed`.
        pack_gqa: query heads in a work tile.
        head_group: batch_heads that are worked on at the same time.
        transposed: work tiles are tiles of keys, each of which visits the queries of `group_size` heads.
        group_size: query heads per kv head, if `transposed`.
    """

    batch_heads: int
    tiles_per_head: int
    heads_per_batch: int
    pack_gqa: int
    head_group: int
    transposed: bool = False
    group_size: int = 1


def tile_schedule(
    mask: Mask | None, ranges: BlockRanges, grid: TileGrid, num_programs: int, shape: tuple[int, ...]
) -> Tensor:
    """Returns int32 [num_programs, max work tiles + 2, 3]: (tile, batch, first head) of each; a tile of -1 ends a list.

    The schedule is cached by the mask's text and `shape`, which says all that the ranges follow from. If the mask has
    tables, the lengths would have to be read from the device: all work tiles then count as equally long.
    """
    known = mask is None or not mask.tables
    text = mask.text if mask is not None and known else None
    device = ranges.counts.device

    def make() -> Tensor:
        if known and not ranges.counts.is_meta:
            costs = tile_costs(ranges, grid)
        else:
            costs = np.ones((grid.batch_heads, grid.tiles_per_head))
        table = _table(assign(costs, grid.head_group, num_programs, grid.transposed))
        return _coordinates(table, grid).to(device)

    return _cache.get((known, text, grid, num_programs, shape, device), device, make)


def tile_costs(ranges: BlockRanges, grid: TileGrid) -> np.ndarray:
    """[batch_heads, tiles_per_head]: blocks that the slowest consumer of a work tile visits, plus a constant."""
    visited = ranges.counts[..., 1].amax(-1).cpu().numpy()  # [batch or 1, heads or 1, tiles]
    if grid.group_size > 1:  # one query head after another
        if visited.shape[1] == 1:
            visited = visited * grid.group_size
        else:
            visited = visited.reshape(visited.shape[0], -1, grid.group_size, grid.tiles_per_head).sum(2)
    visited = visited[:, :: grid.pack_gqa]
    shape = (grid.batch_heads // grid.heads_per_batch, grid.heads_per_batch, grid.tiles_per_head)
    return np.broadcast_to(visited, shape).reshape(grid.batch_heads, grid.tiles_per_head) + _WORK_TILE_COST


def assign(costs: np.ndarray, head_group: int, num_programs: int, transposed: bool = False) -> list[list[int]]:
    """Returns the work tiles of every program, in order; `costs` is [batch_heads, tiles_per_head]."""
    groups = -(-costs.shape[0] // head_group)
    tries = range(1, min(groups, _MAX_MERGED_GROUPS if costs.size <= _MAX_TILES_TO_TRY else 1) + 1)
    found = [
        _longest_first(costs, _sorted(costs, head_group, merged, transposed), num_programs) for merged in tries
    ]  # fmt: skip
    return min(found, key=lambda pair: pair[0])[1]


def _sorted(costs: np.ndarray, head_group: int, merged: int, transposed: bool) -> np.ndarray:
    """Work tiles longest first within a head group; the last `merged` groups are sorted as one. Among equals, of which
    nothing may be known, the tile that is longest under a causal mask comes first: the last one of queries, or
    (`transposed`) the first one of keys."""
    batch_heads, tiles = costs.shape
    head, tile = np.divmod(np.arange(batch_heads * tiles), tiles)
    last = max(0, -(-batch_heads // head_group) - merged)
    group = np.minimum(head // head_group, last)
    return np.lexsort((head, tile if transposed else -tile, -costs.reshape(-1), group))


def _longest_first(costs: np.ndarray, tiles: np.ndarray, num_programs: int) -> tuple[float, list[list[int]]]:
    """(time at which the last program ends, tiles of each program), if each tile goes to the program free first."""
    taken: list[list[int]] = [[] for _ in range(num_programs)]
    free = [(0.0, program) for program in range(num_programs)]
    for tile, cost in zip(tiles.tolist(), costs.reshape(-1)[tiles].tolist()):
        since, program = free[0]
        taken[program].append(tile)
        heapq.heapreplace(free, (since + cost, program))
    return max(free)[0], taken


def _table(taken: list[list[int]]) -> Tensor:
    table = np.full((len(taken), 2 + max(len(tiles) for tiles in taken)), -1, dtype=np.int32)
    for row, tiles in zip(table, taken):
        row[: len(tiles)] = tiles
    return torch.from_numpy(table)


def _coordinates(table: Tensor, grid: TileGrid) -> Tensor:
    """(tile, batch, first head) of work tiles; after the last one, a tile of -1."""
    head, tile = table.clamp(min=0) // grid.tiles_per_head, table.clamp(min=0) % grid.tiles_per_head
    first_head = head % grid.heads_per_batch * grid.pack_gqa
    return torch.stack([torch.where(table < 0, -1, tile), head // grid.heads_per_batch, first_head], -1)
