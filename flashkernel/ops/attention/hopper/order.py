"""Which items each program of the Hopper kernels takes, and in which order: decided once, on the host.

An item is a tile of queries of one line (a head, or the heads packed together); of the backward kernel, a tile of keys
of one key head. Items go, longest first, to whichever program is free first. They are sorted over a block of lines at a
time, as many as have what they read in L2; the last blocks may be sorted as one, so that what is left for the end is
short.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flashkernel.blocks.mask import Mask
from flashkernel.core.tables import DeviceTables
from flashkernel.ops.attention.hopper.walks import MOST_WALKS, Walks

_ITEM = 1.0  # what starting and finishing an item costs, in tiles
_MERGED = 3  # so many of the last blocks are tried as one
_MOST_TRIED = 4096  # with more items than this, blocks are nearly even already, and trying takes its time

_orders: DeviceTables[Tensor] = DeviceTables(MOST_WALKS)


@dataclass(frozen=True)
class Lines:
    """`count` lines of `tiles` items each: `per_batch` lines of `pack` heads, `together` of them at a time.

    `turned`, items are tiles of keys, each of which is taken through the walks of `group` heads.
    """

    count: int
    tiles: int
    per_batch: int
    pack: int
    together: int
    turned: bool = False
    group: int = 1


def order(mask: Mask | None, walk: Walks, lines: Lines, programs: int, shape: tuple[int, ...]) -> Tensor:
    """Int32 [programs, most items + 2, 3]: tile, batch and first head of the items, and then a tile of -1.

    Kept, since `shape` (whatever the walk follows from beside the mask) and the mask's text say it all; where tables
    decide what is seen, nothing is known of lengths without asking the device, and items count as equal.
    """
    known = mask is None or not mask.tables
    text = mask.text if mask is not None and known else None
    device = walk.plans.device

    def make() -> Tensor:
        costs = lengths(walk, lines) if known and not walk.plans.is_meta else np.ones((lines.count, lines.tiles))
        table = _table(assign(costs, lines.together, programs, lines.turned))
        return _parted(table, lines).to(device)

    return _orders.get((known, text, lines, programs, shape, device), device, make)


def lengths(walk: Walks, lines: Lines) -> np.ndarray:
    """[lines, tiles]: key tiles that the slowest warpgroup of an item walks over, and what an item costs besides."""
    own = walk.plans[..., 1].amax(-1).cpu().numpy()  # [batch or 1, heads or 1, tiles]
    if lines.group > 1:  # one head after another, or one for all
        own = own * lines.group if own.shape[1] == 1 else own.reshape(own.shape[0], -1, lines.group, lines.tiles).sum(2)
    own = own[:, :: lines.pack]
    shape = (lines.count // lines.per_batch, lines.per_batch, lines.tiles)
    return np.broadcast_to(own, shape).reshape(lines.count, lines.tiles) + _ITEM


def assign(costs: np.ndarray, together: int, programs: int, turned: bool = False) -> list[list[int]]:
    """The items of every program, in order; `costs` is [lines, tiles]."""
    blocks = -(-costs.shape[0] // together)
    tries = range(1, min(blocks, _MERGED if costs.size <= _MOST_TRIED else 1) + 1)
    found = [_assigned(costs, _sorted(costs, together, merged, turned), programs) for merged in tries]
    return min(found, key=lambda pair: pair[0])[1]


def _sorted(costs: np.ndarray, together: int, merged: int, turned: bool) -> np.ndarray:
    """Items longest first, over `together` lines at a time and at last `merged` times as many. Among equals, of which
    nothing may be known, that tile is first that would be longest under a causal mask: the last, or `turned` the
    first."""
    lines, tiles = costs.shape
    line, tile = np.divmod(np.arange(lines * tiles), tiles)
    last = max(0, -(-lines // together) - merged)
    return np.lexsort((line, tile if turned else -tile, -costs.reshape(-1), np.minimum(line // together, last)))


def _assigned(costs: np.ndarray, items: np.ndarray, programs: int) -> tuple[float, list[list[int]]]:
    """(when the last program is done, the items of each), when each item goes to the program that is free first."""
    taken: list[list[int]] = [[] for _ in range(programs)]
    free = [(0.0, program) for program in range(programs)]
    for item, cost in zip(items.tolist(), costs.reshape(-1)[items].tolist()):
        since, program = free[0]
        taken[program].append(item)
        heapq.heapreplace(free, (since + cost, program))
    return max(free)[0], taken


def _table(taken: list[list[int]]) -> Tensor:
    table = np.full((len(taken), 2 + max(len(items) for items in taken)), -1, dtype=np.int32)
    for row, items in zip(table, taken):
        row[: len(items)] = items
    return torch.from_numpy(table)


def _parted(table: Tensor, lines: Lines) -> Tensor:
    """(tile, batch, first head) of items; after the last, a tile of -1."""
    line, tile = table.clamp(min=0) // lines.tiles, table.clamp(min=0) % lines.tiles
    head = line % lines.per_batch * lines.pack
    return torch.stack([torch.where(table < 0, -1, tile), line // lines.per_batch, head], -1)
