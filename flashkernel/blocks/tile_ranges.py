"""Tile ranges: the tiles that an attention kernel iterates over for one tile of queries, or of keys.

A range is (first tile, end, masked): neighboring tiles that are all full, or all partial. A causal row of tiles has
two ranges: the full tiles, then the partial ones on the diagonal. A window has three: partial, full, partial. Within a
range the loop has no branches, so the compiler can keep loads in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from flashkernel.blocks.expression import Variable
from flashkernel.blocks.mask import EMPTY, PARTIAL, Mask, recalled
from flashkernel.core.derived import derived
from flashkernel.core.tables import DeviceTables

SHORT_ROW = 4  # tiles
COARSE = 128  # queries and keys of a tile, where it only matters whether a mask leaves few or many
MAX_CACHED = 256  # masks and shapes


@dataclass(frozen=True)
class TileRanges:
    """`table` is int32 [batch or 1, heads or 1, tiles, max ranges, 3]: first tile, end, 1 where pairs must be masked;
    `count` is int32 [batch or 1, heads or 1, tiles]."""

    table: Tensor
    count: Tensor

    @property
    def max_ranges(self) -> int:
        return self.table.shape[3]

    @property
    def strides(self) -> tuple[int, int]:
        """Rows of the table between two batches and between two heads; 0 where they share them."""
        batch, heads, tiles = self.count.shape
        return heads * tiles if batch > 1 else 0, tiles if heads > 1 else 0


def ranges_of(status: Tensor) -> TileRanges:
    """The ranges along the last dim of a tile map (`Mask.tiles`), int8 [..., tiles]; asks the device for the largest
    number of them."""
    *leading, tiles = status.shape
    edge = status.new_full((*leading, 1), EMPTY)
    present = status != EMPTY
    starts = present & (status != torch.cat([edge, status[..., :-1]], -1))
    ends = present & (status != torch.cat([status[..., 1:], edge], -1))
    count = starts.sum(-1, dtype=torch.int32)
    most = tiles if status.is_meta else int(count.max()) if count.numel() else 0
    tile = torch.arange(tiles, device=status.device, dtype=torch.int32).expand(status.shape)
    # Range r goes to column r; tiles that start (or end) no range go to a spare column, dropped at the end.
    order = starts.cumsum(-1) - 1
    table = status.new_zeros((*leading, most + 1, 3), dtype=torch.int32)
    columns = torch.where(starts, order, most).clamp(max=most)
    table[..., 0].scatter_(-1, columns, tile)
    table[..., 2].scatter_(-1, columns, (status == PARTIAL).to(torch.int32))
    columns = torch.where(ends, order, most).clamp(max=most)
    table[..., 1].scatter_(-1, columns, tile + 1)
    return TileRanges(table[..., :most, :].contiguous(), count)


def merge_short_rows(status: Tensor) -> Tensor:
    """A tile map in which short rows are one range: masking a few full tiles costs less than starting another loop."""
    present = status != EMPTY
    short = present.sum(-1, keepdim=True) <= SHORT_ROW
    return torch.where(present & short & (status == PARTIAL).any(-1, keepdim=True), PARTIAL, status)


def max_visible_keys(mask: Mask | None, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> int:
    """The most keys that a tile of queries visits; all of them where tables decide, which would ask the device."""
    return _visible_keys(torch.max, mask, (batch, heads, seqlen_q, seqlen_k))


def mean_visible_keys(mask: Mask | None, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> int:
    """About how many keys a tile of queries visits; all of them where tables decide, which would ask the device."""
    return _visible_keys(torch.mean, mask, (batch, heads, seqlen_q, seqlen_k))


def _visible_keys(over_rows: Callable[[Tensor], Tensor], mask: Mask | None, sizes: tuple[int, int, int, int]) -> int:
    return sizes[-1] if mask is None or mask.tables else _keys_of_tiles(over_rows, mask.text, sizes)


@lru_cache(maxsize=MAX_CACHED)
def _keys_of_tiles(over_rows: Callable[[Tensor], Tensor], text: str, sizes: tuple[int, int, int, int]) -> int:
    tiles = (recalled(text, []).tiles(*sizes, COARSE, COARSE) != EMPTY).sum(-1)  # that a tile of queries visits
    return min(sizes[-1], COARSE * int(over_rows(tiles.float()))) if tiles.numel() else 0


_cached: DeviceTables[tuple[TileRanges, TileRanges]] = DeviceTables(MAX_CACHED)


def tile_ranges(
    mask: Mask | None,
    batch: int,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
    block_m: int,
    block_n: int,
    device: torch.device,
    transposed: bool = False,
) -> TileRanges:
    """Ranges of key tiles for each query tile; with `transposed`, of query tiles for each key tile.

    Without tables the answer follows from the sizes, and is cached. With tables two launches make it, once for each
    version of them (core/derived.py), without asking the device: the number of ranges is bounded by that of tiles.
    """
    sizes = (batch, heads, seqlen_q, seqlen_k, block_m, block_n)
    if mask is not None and mask.tables:
        text = mask.text

        def follow(*tables: Tensor) -> tuple[Tensor, ...]:
            from flashkernel.blocks.tile_status import make_tile_ranges

            return make_tile_ranges(recalled(text, tables), sizes, transposed)

        return TileRanges(*derived(("tile_ranges", text, sizes, transposed), mask.tables, follow))

    def make() -> tuple[TileRanges, TileRanges]:
        seen = Mask(Variable("k") >= 0) if mask is None else mask
        status = seen.tiles(*sizes, device)
        return ranges_of(merge_short_rows(status)), ranges_of(merge_short_rows(status.transpose(-1, -2)))

    return _cached.get((None if mask is None else mask.text, sizes, device), device, make)[transposed]
