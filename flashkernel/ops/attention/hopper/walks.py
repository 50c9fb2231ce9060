"""Which key tiles a program of the Hopper kernels loads, and which of them each of its warpgroups walks over.

The tiles of a program are those that any of its warpgroups needs. A warpgroup hands back those before its first and
after its last, and walks over the others: in runs of neighbouring tiles, masked or not, as in blocks/runs.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from flashkernel.blocks.expression import Variable, evaluate
from flashkernel.blocks.mask import EMPTY, FULL, PARTIAL, Mask, recalled
from flashkernel.blocks.runs import runs_of
from flashkernel.core.tables import DeviceTables

_EVERYTHING = Mask(Variable("k") >= 0)
_SPAN_TILE = 128
_FEW_TILES = 8  # of which a walk is too short to begin anywhere but at the first
_SHIFT = 5  # tiles between the beginnings of neighbouring walks; coprime with what lengths of sequences divide into


@dataclass(frozen=True)
class Walks:
    """Int32 tables; the leading dims are [batch or 1, heads or 1]."""

    runs: Tensor  # [..., programs, warpgroups, most runs, 3]: first tile, end, 1 where the run must be masked
    plans: Tensor  # [..., programs, warpgroups, 3]: tiles handed back at first, walked over, handed back at last
    loads: Tensor  # [..., programs, most loads, 3]: first tile, end, (unused)
    counts: Tensor  # [..., programs]: runs of loads

    @property
    def strides(self) -> tuple[int, int]:
        """Programs between two batches and between two heads; 0 where they share the tables."""
        batch, heads, programs = self.counts.shape
        return heads * programs if batch > 1 else 0, programs if heads > 1 else 0


MOST_WALKS = 256
_walks: DeviceTables[Walks] = DeviceTables(MOST_WALKS)


def walks(
    mask: Mask | None, batch: int, heads: int, queries: int, keys: int, rows: int, columns: int, groups: int,
    device: torch.device, turned: bool = False, spare_first: bool = False,
) -> Walks:  # fmt: skip
    """The walks of warpgroups with `rows` rows each over tiles of `columns`; kept where the mask has no tables.

    Rows are queries and columns keys; `turned`, it is the other way round. Where rows do not come out even, the
    warpgroups without any are the last ones, or with `spare_first` the first.
    """
    shape = (batch, heads, queries, keys, rows, columns, groups, device, turned, spare_first)
    if mask is not None and mask.tables:
        return _computed(mask, *shape)

    def make() -> Walks:
        if mask is not None:
            return _computed(mask, *shape)
        return _scattered(_computed(_EVERYTHING, *shape), queries if turned else keys, columns)

    return _walks.get((None if mask is None else mask.text, *shape), device, make)


def _computed(
    mask: Mask, batch: int, heads: int, queries: int, keys: int, rows: int, columns: int, groups: int,
    device: torch.device, turned: bool, spare_first: bool,
) -> Walks:  # fmt: skip
    if turned:
        fine = mask.tiles(batch, heads, queries, keys, columns, rows, device).transpose(-1, -2)
    else:
        fine = mask.tiles(batch, heads, queries, keys, rows, columns, device)
    spare = -fine.shape[2] % groups
    if spare:
        fine = torch.nn.functional.pad(fine, (0, 0, spare, 0) if spare_first else (0, 0, 0, spare), value=EMPTY)
    fine = fine.unflatten(2, (-1, groups))  # [B, H, programs, warpgroups, tiles]
    present = fine != EMPTY
    needed = present.any(3, keepdim=True)  # [B, H, programs, 1, tiles]
    begun = present.cumsum(-1) > 0
    ended = present.flip(-1).cumsum(-1).flip(-1) == 0
    span = needed & begun & ~ended
    status = torch.where(span, torch.where(present, fine, PARTIAL), EMPTY)
    counts = [(needed & ~begun).sum(-1), span.sum(-1), (needed & ended & begun).sum(-1)]
    # A warpgroup that needs nothing has neither begun nor ended: all tiles count as handed back at first.
    plans = torch.stack([count.to(torch.int32) for count in counts], -1)
    most = max(1, status.shape[-1]) if mask.tables else None
    own = runs_of(status, most)
    loads = runs_of(needed.squeeze(3).to(torch.int8) * FULL, most)
    return Walks(_at_least_one(own.table), plans.contiguous(), _at_least_one(loads.table), loads.count)


def _scattered(walk: Walks, length: int, columns: int) -> Walks:
    """Walks over everything, each program's from a tile of its own on and round to the one before it: programs that
    work on a head at the same time would otherwise ask L2 for the same tile at the same time."""
    whole, tiles = length // columns, -(-length // columns)
    programs, groups = walk.plans.shape[2:4]
    if whole < _FEW_TILES:
        return walk
    start = torch.arange(programs, device=walk.runs.device) * _SHIFT % whole
    zero, masked = torch.zeros_like(start), walk.runs[0, 0, :, 0, 0, 2]  # those of a program's own last rows are
    runs = [torch.stack([start, zero + whole, masked], -1), torch.stack([zero, start, masked], -1)]  # [programs, 3]
    if tiles > whole:  # the last one is masked
        runs.insert(1, torch.stack([zero + whole, zero + tiles, zero + 1], -1))
    table = torch.stack(runs, 1).to(torch.int32)[None, None]  # [1, 1, programs, runs, 3]
    counts = (len(runs) - (start == 0).to(torch.int32)).to(torch.int32)[None, None]
    own = table[:, :, :, None].expand(-1, -1, -1, groups, -1, -1) * (walk.plans[..., 1] > 0)[..., None, None]
    return Walks(own.to(torch.int32), walk.plans, table.contiguous(), counts)


def _at_least_one(table: Tensor) -> Tensor:
    """A table with room for a run, which kernels read before they know that there is none."""
    return table if table.shape[-2] else table.new_zeros((*table.shape[:-2], 1, 3))


@lru_cache(maxsize=MOST_WALKS)
def _span_of(text: str, batch: int, heads: int, queries: int, keys: int) -> int:
    mask = recalled(text, [])
    status = mask.tiles(batch, heads, queries, keys, _SPAN_TILE, _SPAN_TILE)
    seen = (status != EMPTY).sum(-1).float().mean() if status.numel() else torch.zeros(())
    return min(keys, int(seen) * _SPAN_TILE)


def all_see(mask: Mask | None, queries: int, keys: int) -> bool:
    """Whether every query is known to see a key: of its own position, the first or the last one."""
    if mask is None:
        return keys > 0
    if mask.tables or mask.depends & {"b", "h"}:  # nothing is asked of the device, nor looked for in every head
        return False
    return _all_see(mask.text, queries, keys)


@lru_cache(maxsize=MOST_WALKS)
def _all_see(text: str, queries: int, keys: int) -> bool:
    if queries == 0 or keys == 0:
        return queries == 0
    q = torch.arange(queries).view(-1, 1)
    own = (q + (keys - queries)).clamp(0, keys - 1)
    k = torch.cat([own, torch.zeros_like(own), torch.full_like(own, keys - 1)], 1)  # [queries, 3]
    seen = evaluate(recalled(text, []).expression, {"q": q, "k": k, "sq": queries, "sk": keys})
    return bool(torch.as_tensor(seen).expand(k.shape).any(1).all())


def span(mask: Mask | None, batch: int, heads: int, queries: int, keys: int) -> int:
    """About how many keys a tile of queries sees; where that is not known without asking the device, all of them."""
    if mask is None or mask.tables:
        return keys
    return _span_of(mask.text, batch, heads, queries, keys)
