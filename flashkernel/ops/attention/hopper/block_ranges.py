"""Block ranges of the Hopper kernels: which K blocks a work tile loads, and which of them each consumer visits.

The producer of a work tile loads every K block that at least one of its consumer warpgroups needs. A consumer skips the
loaded blocks before its first and after its last visible block, and visits those between: in ranges of neighboring
blocks, masked or not, as in blocks/tile_ranges.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from flashkernel.blocks.expression import Variable, evaluate
from flashkernel.blocks.mask import EMPTY, FULL, PARTIAL, Mask, recalled
from flashkernel.blocks.tile_ranges import ranges_of
from flashkernel.core.derived import derived
from flashkernel.core.tables import DeviceTables

_EVERYTHING = Mask(Variable("k") >= 0)
_MIN_BLOCKS_TO_ROTATE = 8  # K blocks; shorter sequences are read from the first block on
_ROTATION_STEP = 5  # blocks between the starts of neighboring work tiles; coprime with usual numbers of blocks


@dataclass(frozen=True)
class BlockRanges:
    """Int32 tables of block ranges. The leading dims are [batch or 1, heads or 1].

    Attributes:
        ranges: [..., work tiles, consumers, max ranges, 3]: first block, end, 1 if the blocks must be masked.
        counts: [..., work tiles, consumers, 3]: loaded blocks that the consumer skips before its first one, visits, and
            skips after its last one.
        loads: [..., work tiles, max loads, 3]: first block, end, (unused) of what the producer loads.
        load_counts: [..., work tiles]: number of ranges in `loads`.
    """

    ranges: Tensor
    counts: Tensor
    loads: Tensor
    load_counts: Tensor

    @property
    def strides(self) -> tuple[int, int]:
        """Work tiles between two batch entries and between two heads; 0 where they share the tables."""
        batch, heads, work_tiles = self.load_counts.shape
        return heads * work_tiles if batch > 1 else 0, work_tiles if heads > 1 else 0


MAX_CACHED = 256
_cache: DeviceTables[BlockRanges] = DeviceTables(MAX_CACHED)


def block_ranges(
    mask: Mask | None, batch: int, heads: int, seqlen_q: int, seqlen_k: int, block_m: int, block_n: int,
    num_consumers: int, device: torch.device, transposed: bool = False, pad_front: bool = False,
) -> BlockRanges:  # fmt: skip
    """Returns the block ranges of work tiles of `num_consumers` consumers, made once for each shape, or by two launches
    for each version of the mask's tables (core/derived.py).

    Args:
        block_m: queries of a consumer, or with `transposed` of a visited block.
        block_n: keys of a visited block, or with `transposed` of a consumer.
        transposed: consumers own blocks of keys and visit blocks of queries, as in the backward kernels.
        pad_front: if the number of consumers' blocks is not a multiple of `num_consumers`, the consumers without a
            block are the first of the first work tile instead of the last of the last one.
    """
    sizes = (batch, heads, seqlen_q, seqlen_k, block_m, block_n)
    shape = (*sizes, num_consumers, device, transposed, pad_front)
    if mask is not None and mask.tables:
        text = mask.text

        def follow(*tables: Tensor) -> tuple[Tensor, ...]:
            from flashkernel.blocks.tile_status import make_block_ranges

            return make_block_ranges(recalled(text, tables), sizes, num_consumers, transposed, pad_front)

        return BlockRanges(*derived(("block_ranges", text, *shape), mask.tables, follow))

    def make() -> BlockRanges:
        if mask is not None:
            return _from_mask(mask, *shape)
        visited = (seqlen_q, block_m) if transposed else (seqlen_k, block_n)
        return _rotated(_from_mask(_EVERYTHING, *shape), *visited)

    return _cache.get((None if mask is None else mask.text, *shape), device, make)


def _from_mask(
    mask: Mask, batch: int, heads: int, seqlen_q: int, seqlen_k: int, block_m: int, block_n: int, num_consumers: int,
    device: torch.device, transposed: bool, pad_front: bool,
) -> BlockRanges:  # fmt: skip
    blocks = mask.tiles(batch, heads, seqlen_q, seqlen_k, block_m, block_n, device)
    if transposed:
        blocks = blocks.transpose(-1, -2)
    padding = -blocks.shape[2] % num_consumers
    if padding:
        blocks = torch.nn.functional.pad(blocks, (0, 0, padding, 0) if pad_front else (0, 0, 0, padding), value=EMPTY)
    blocks = blocks.unflatten(2, (-1, num_consumers))  # [B, H, work tiles, consumers, blocks]
    visible = blocks != EMPTY
    loaded = visible.any(3, keepdim=True)  # [B, H, work tiles, 1, blocks]
    from_first = visible.cumsum(-1) > 0
    after_last = visible.flip(-1).cumsum(-1).flip(-1) == 0
    visited = loaded & from_first & ~after_last
    status = torch.where(visited, torch.where(visible, blocks, PARTIAL), EMPTY)
    # A consumer without a visible block is neither past its first nor past its last: it skips all blocks "before".
    skipped_before, skipped_after = loaded & ~from_first, loaded & after_last & from_first
    counts = [x.sum(-1).to(torch.int32) for x in (skipped_before, visited, skipped_after)]
    ranges, loads = ranges_of(status), ranges_of(loaded.squeeze(3).to(torch.int8) * FULL)
    return BlockRanges(
        _at_least_one(ranges.table), torch.stack(counts, -1).contiguous(), _at_least_one(loads.table), loads.count
    )


def _rotated(found: BlockRanges, seqlen: int, block: int) -> BlockRanges:
    """Without a mask: each work tile starts at a block of its own and wraps around. SMs that work on the same head at
    the same time would otherwise ask L2 for the same block at the same time."""
    whole, blocks = seqlen // block, -(-seqlen // block)
    work_tiles, num_consumers = found.counts.shape[2:4]
    if whole < _MIN_BLOCKS_TO_ROTATE:
        return found
    start = torch.arange(work_tiles, device=found.ranges.device) * _ROTATION_STEP % whole
    zero, masked = torch.zeros_like(start), found.ranges[0, 0, :, 0, 0, 2]  # 1 for a work tile with rows past the end
    parts = [torch.stack([start, zero + whole, masked], -1), torch.stack([zero, start, masked], -1)]  # [work tiles, 3]
    if blocks > whole:  # the last one is masked
        parts.insert(1, torch.stack([zero + whole, zero + blocks, zero + 1], -1))
    loads = torch.stack(parts, 1).to(torch.int32)[None, None]  # [1, 1, work tiles, ranges, 3]
    load_counts = (len(parts) - (start == 0).to(torch.int32)).to(torch.int32)[None, None]
    visits = (found.counts[..., 1] > 0)[..., None, None]
    ranges = loads[:, :, :, None].expand(-1, -1, -1, num_consumers, -1, -1) * visits
    return BlockRanges(ranges.to(torch.int32), found.counts, loads.contiguous(), load_counts)


def _at_least_one(table: Tensor) -> Tensor:
    """A table with room for one range: kernels read the first range before they know that there is none."""
    return table if table.shape[-2] else table.new_zeros((*table.shape[:-2], 1, 3))


def every_row_visible(mask: Mask | None, seqlen_q: int, seqlen_k: int) -> bool:
    """True if every query is known to see a key: the one at its own position, the first or the last one."""
    if mask is None:
        return seqlen_k > 0
    if mask.tables or mask.depends & {"b", "h"}:  # would need the device, or a search over all heads
        return False
    return _every_row_visible(mask.text, seqlen_q, seqlen_k)


@lru_cache(maxsize=MAX_CACHED)
def _every_row_visible(text: str, seqlen_q: int, seqlen_k: int) -> bool:
    if seqlen_q == 0 or seqlen_k == 0:
        return seqlen_q == 0
    q = torch.arange(seqlen_q, device="cpu").view(-1, 1)
    diagonal = (q + (seqlen_k - seqlen_q)).clamp(0, seqlen_k - 1)
    k = torch.cat([diagonal, torch.zeros_like(diagonal), torch.full_like(diagonal, seqlen_k - 1)], 1)  # [seqlen_q, 3]
    visible = evaluate(recalled(text, []).expression, {"q": q, "k": k, "sq": seqlen_q, "sk": seqlen_k})
    return bool(torch.as_tensor(visible, device="cpu").expand(k.shape).any(1).all())
