"""Runs of neighbouring tiles: what an attention kernel walks over for one tile of queries, or of keys.

A causal row of tiles is two runs: full ones, then the partial ones on the diagonal. A window is three: partial, full,
partial. Inside a run the loop is plain, so that the compiler can keep loads in flight.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from flashkernel.blocks.expression import Variable
from flashkernel.blocks.mask import EMPTY, PARTIAL, Mask, recalled
from flashkernel.core.tables import DeviceTables


@dataclass(frozen=True)
class Runs:
    """`table` is int32 [batch or 1, heads or 1, tiles, most runs, 3]: first tile, end, 1 where the run must be masked;
    `count` is int32 [batch or 1, heads or 1, tiles]."""

    table: Tensor
    count: Tensor


def runs_of(status: Tensor, most: int | None = None) -> Runs:
    """The runs along the last dim of a tile map; `most` bounds their number where the device must not be asked."""
    *leading, tiles = status.shape
    edge = status.new_full((*leading, 1), EMPTY)
    present = status != EMPTY
    starts = present & (status != torch.cat([edge, status[..., :-1]], -1))
    ends = present & (status != torch.cat([status[..., 1:], edge], -1))
    count = starts.sum(-1, dtype=torch.int32)
    if most is None:
        most = tiles if status.is_meta else int(count.max()) if count.numel() else 0
    place = torch.arange(tiles, device=status.device, dtype=torch.int32).expand(status.shape)
    # Run r goes to column r; what is no start (or end) goes to a spare column, dropped at the end.
    order = starts.cumsum(-1) - 1
    table = status.new_zeros((*leading, most + 1, 3), dtype=torch.int32)
    columns = torch.where(starts, order, most).clamp(max=most)
    table[..., 0].scatter_(-1, columns, place)
    table[..., 2].scatter_(-1, columns, (status == PARTIAL).to(torch.int32))
    columns = torch.where(ends, order, most).clamp(max=most)
    table[..., 1].scatter_(-1, columns, place + 1)
    return Runs(table[..., :most, :].contiguous(), count)


SHORT = 4  # tiles


def joined(status: Tensor) -> Tensor:
    """A tile map in which short walks are one run: to mask a few full tiles costs less than to start a loop anew."""
    present = status != EMPTY
    short = present.sum(-1, keepdim=True) <= SHORT
    return torch.where(present & short & (status == PARTIAL).any(-1, keepdim=True), PARTIAL, status)


COARSE = 128  # keys of a tile, where it only matters whether a mask leaves few or many
MOST_PLANS = 256


def span(mask: Mask | None, batch: int, heads: int, queries: int, keys: int) -> int:
    """The most keys that a tile of queries walks over; all of them where tables decide, which would ask the device."""
    if mask is None or mask.tables:
        return keys
    return _span(mask.text, batch, heads, queries, keys)


@lru_cache(maxsize=MOST_PLANS)
def _span(text: str, batch: int, heads: int, queries: int, keys: int) -> int:
    present = recalled(text, []).tiles(batch, heads, queries, keys, COARSE, COARSE) != EMPTY
    return min(keys, COARSE * int(present.sum(-1).max())) if present.numel() else 0


_plans: DeviceTables[tuple[Runs, Runs]] = DeviceTables(MOST_PLANS)


def plan(
    mask: Mask | None, batch: int, heads: int, queries: int, keys: int, rows: int, columns: int, device: torch.device
) -> tuple[Runs, Runs]:
    """(runs of key tiles for each query tile, runs of query tiles for each key tile).

    Without tables the answer follows from the sizes, and is kept. With tables it is computed anew, without asking the
    device: the number of runs is bounded by that of tiles.
    """
    if mask is not None and mask.tables:
        status = mask.tiles(batch, heads, queries, keys, rows, columns, device)
        turned = status.transpose(-1, -2)
        return runs_of(joined(status), status.shape[-1]), runs_of(joined(turned), turned.shape[-1])

    def make() -> tuple[Runs, Runs]:
        seen = Mask(Variable("k") >= 0) if mask is None else mask
        status = seen.tiles(batch, heads, queries, keys, rows, columns, device)
        return runs_of(joined(status)), runs_of(joined(status.transpose(-1, -2)))

    key = (None if mask is None else mask.text, batch, heads, queries, keys, rows, columns, device)
    return _plans.get(key, device, make)
