"""The split-KV schedule: which K blocks a program takes, computed on the device from `cache_seqlens`.

The keys of a sequence are cut into K blocks of BLOCK_N. A work tile is one output tile: a sequence, TILE_KV_HEADS KV
heads, BLOCK_M (query, head) rows. The K blocks of all work tiles are numbered one after another, and every program
takes an equal range of them (Stream-K): the end of one work tile, whole ones, the beginning of another. Where work
tiles are about as long as these ranges, each program takes one whole work tile instead.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class KBlockRange(NamedTuple):
    """The K blocks that a sequence's queries see: the i-th is K block i for i < sink_blocks, else K block i + skip."""

    sink_blocks: Any
    skip: Any
    count: Any
    key_min: Any  # the first visible key behind the sink tokens


@triton.jit
def k_block_range(seqlen, seqlen_q, prefix, window, WINDOWED: tl.constexpr, BLOCK_N: tl.constexpr):
    """The K blocks of the keys [prefix, seqlen), or with a window of the sink tokens and the first query's window."""
    end = (seqlen + BLOCK_N - 1) // BLOCK_N
    if WINDOWED:
        key_min = tl.maximum(seqlen - seqlen_q + 1 - window.size, 0)
        sink_blocks = (tl.minimum(key_min, window.sink_tokens) + BLOCK_N - 1) // BLOCK_N
        skip = tl.maximum(key_min // BLOCK_N, sink_blocks) - sink_blocks
        return KBlockRange(sink_blocks, skip, end - skip, key_min)
    else:
        key_min = seqlen * 0 + prefix
        skip = key_min // BLOCK_N
        return KBlockRange(key_min * 0, skip, tl.maximum(end - skip, 0), key_min)


@triton.jit
def blocks_per_sequence(
    sequence, cache_seqlens, batch, capacity, seqlen_q, prefix, window, work_tiles,
    WINDOWED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """K blocks of each sequence's `work_tiles` work tiles, [BATCH]; a work tile without keys counts one, for its zeros
    must be written."""
    seqlen = tl.load(cache_seqlens + sequence, mask=sequence < batch, other=0)
    seqlen = tl.minimum(tl.maximum(seqlen, 0), capacity).to(tl.int32)
    blocks = k_block_range(seqlen, seqlen_q, prefix, window, WINDOWED, BLOCK_N)
    return tl.where(sequence < batch, tl.maximum(blocks.count, 1) * work_tiles, 0)


@triton.jit
def range_begin(program, total_blocks, programs):
    """The first block of a program's range; ranges differ by one block at most."""
    return program * (total_blocks // programs) + tl.minimum(program, total_blocks % programs)


@triton.jit
def program_of(block, total_blocks, programs):
    """The program whose range holds this block."""
    quotient, remainder = total_blocks // programs, total_blocks % programs
    longer_end = remainder * (quotient + 1)  # the first `remainder` programs have one block more
    return tl.where(
        block < longer_end, block // (quotient + 1), remainder + (block - longer_end) // tl.maximum(quotient, 1)
    )


@triton.jit
def one_tile_per_program(blocks, total_blocks, work_tiles, sequences, programs):
    """Whether each program takes one whole work tile: where that takes hardly longer, nothing is left to combine."""
    longest = tl.max(blocks, 0) // work_tiles
    return (sequences * work_tiles <= programs) & (longest * programs * 15 <= total_blocks * 16)


@triton.jit
def program_range(sequence, blocks, work_tiles, sequences, program, programs):
    """(begin, end) of the blocks that a program takes; `blocks` [BATCH] are those of each `sequence` [BATCH]."""
    total_blocks = tl.sum(blocks, 0)
    if one_tile_per_program(blocks, total_blocks, work_tiles, sequences, programs):
        own = program // work_tiles  # beyond the last sequence for programs that stay idle
        tile_blocks = tl.sum(tl.where(sequence == own, blocks, 0), 0) // work_tiles
        begin = tl.sum(tl.where(sequence < own, blocks, 0), 0) + program % work_tiles * tile_blocks
        end = begin + tile_blocks
    else:
        begin, end = range_begin(program, total_blocks, programs), range_begin(program + 1, total_blocks, programs)
    return begin, end
