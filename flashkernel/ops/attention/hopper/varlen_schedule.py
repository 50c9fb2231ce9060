"""Tile schedule of packed sequences (varlen), made on the device by one launch from their cumulative lengths.

A work tile never crosses the end of a sequence. The launch finds for each work tile its sequence and the blocks that it
visits, in closed form (query i is aligned with key i + seqlen_k - seqlen_q, and sees from `left` keys before that one
to `right` behind it), and its rank, longest first: how many work tiles of each sequence are longer follows from the
lengths alone. Programs need nothing from each other, and the host never waits for the device.

Each persistent program of the kernels gets a list of work tiles. Heads are worked on in groups: neighboring work tiles
of a sequence and head then run at the same time, and read the same blocks from L2. Within a group the work tiles go to
the programs round-robin, longest first, in alternating direction. Each group starts at another program, so that a
program with the longest work tiles of one group gets shorter ones of the next.

The tokens behind the last sequence count as one more sequence, hidden from each other: kernels then write their zeros.

How many work tiles there are is known on the device only. The tables have room for the most there can be: one partial
tile for each sequence. Lists end with -1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashkernel.core import tune
from flashkernel.core.launch import launch
from flashkernel.ops.attention.hopper.pipeline import CONSUMER, MAX_RANGES, RECORD
from flashkernel.ops.attention.hopper.varlen_layout import Grid, VarlenLayout

_PROGRAM_TILES = tl.constexpr(32)  # work tiles, or blocks of queries, of a program
_CHUNK = tl.constexpr(128)  # sequences that a program looks at together
_ENTRIES = tl.constexpr(1024)  # entries of the programs' lists that a program of this kernel makes
_RECORD, _CONSUMER = tl.constexpr(RECORD.value), tl.constexpr(CONSUMER.value)
_COUNTS = tl.constexpr(3 * MAX_RANGES.value)  # of a consumer, behind its ranges


class Lengths(NamedTuple):
    """Cumulative lengths, their number less one, and the tokens in all."""

    cu_q: Any
    cu_k: Any
    num_sequences: Any
    tokens_q: Any
    tokens_k: Any


@triton.jit
def _start(cu, sequence, num_sequences, tokens):
    """Where a sequence starts; sequence number `num_sequences` are the tokens behind the last one."""
    start = tl.load(cu + tl.minimum(sequence, num_sequences)).to(tl.int32)
    return tl.minimum(tl.maximum(tl.where(sequence > num_sequences, tokens, start), 0), tokens)


@triton.jit
def _sequences(lengths, sequence, TRANSPOSED: tl.constexpr):
    """(q_start, q_len, k_start, k_len) of sequences. Tokens behind the last one see nothing, and are not seen."""
    q_start = _start(lengths.cu_q, sequence, lengths.num_sequences, lengths.tokens_q)
    k_start = _start(lengths.cu_k, sequence, lengths.num_sequences, lengths.tokens_k)
    q_end = _start(lengths.cu_q, sequence + 1, lengths.num_sequences, lengths.tokens_q)
    k_end = _start(lengths.cu_k, sequence + 1, lengths.num_sequences, lengths.tokens_k)
    q_len, k_len = tl.maximum(q_end - q_start, 0), tl.maximum(k_end - k_start, 0)
    if TRANSPOSED:
        q_len = tl.where(sequence < lengths.num_sequences, q_len, 0)
    else:
        k_len = tl.where(sequence < lengths.num_sequences, k_len, 0)
    return q_start, q_len, k_start, k_len


@triton.jit
def _padding(q_len, TILE: tl.constexpr):
    """Rows in front of a sequence that its first work tile has too many."""
    if TILE.PAD_FRONT:
        blocks = (q_len + TILE.BLOCK - 1) // TILE.BLOCK
        padding = (TILE.NUM_CONSUMERS - blocks % TILE.NUM_CONSUMERS) % TILE.NUM_CONSUMERS * TILE.BLOCK
    else:
        padding = q_len * 0
    return padding


@triton.jit
def _num_tiles(q_len, k_len, TILE: tl.constexpr):
    ROWS: tl.constexpr = TILE.BLOCK * TILE.NUM_CONSUMERS
    return ((k_len if TILE.TRANSPOSED else q_len) + ROWS - 1) // ROWS


@triton.jit
def _cost(q_len, k_len, tile, right, TILE: tl.constexpr):
    """What work tiles are sorted by: the last key that one sees; with TRANSPOSED, the number of queries that see it."""
    ROWS: tl.constexpr = TILE.BLOCK * TILE.NUM_CONSUMERS
    reach = k_len - q_len + right  # of query 0
    if TILE.TRANSPOSED:
        cost = q_len - tl.minimum(tl.maximum(tile * ROWS - reach, 0), q_len)
    else:
        cost = tl.minimum(k_len, (tile + 1) * ROWS - _padding(q_len, TILE) + reach)
    return cost


@triton.jit
def _num_longer(q_len, k_len, cost, right, TILE: tl.constexpr):
    """How many work tiles of a sequence cost more than `cost`."""
    ROWS: tl.constexpr = TILE.BLOCK * TILE.NUM_CONSUMERS
    tiles = _num_tiles(q_len, k_len, TILE)
    reach = k_len - q_len + right
    if TILE.TRANSPOSED:
        longer = tl.minimum((tl.maximum(q_len - cost + reach, 0) + ROWS - 1) // ROWS, tiles)
        longer = tl.where(q_len > cost, longer, 0)
    else:
        shorter = tl.maximum(cost - reach + _padding(q_len, TILE), 0) // ROWS
        longer = tl.where(k_len > cost, tiles - tl.minimum(shorter, tiles), 0)
    return longer


@triton.jit
def _visited_blocks(low, high, before, behind, length, exists, whole, VISITED: tl.constexpr):
    """(begin, end, begin and end of those without a mask) of the blocks that rows at positions low to high visit.

    A row at position p sees [p - before, p + behind], of `length` in all. Unless `whole`, all blocks are masked.
    """
    begin = tl.maximum(low - before, 0)
    end = tl.minimum(high + behind + 1, length)
    seen = exists & (end > begin)
    block_begin = tl.where(seen, begin // VISITED, 0)
    block_end = tl.where(seen, (end + VISITED - 1) // VISITED, 0)
    full_begin = tl.maximum((tl.maximum(high - before, 0) + VISITED - 1) // VISITED, block_begin)
    full_end = tl.minimum(tl.maximum(tl.minimum(low + behind + 1, length), 0) // VISITED, block_end)
    full_end = tl.where(whole & (full_end > full_begin), full_end, full_begin)
    return block_begin, block_end, full_begin, full_end


@triton.jit
def _store_range(ranges, begin, end, masked, exists):
    tl.store(ranges, begin, mask=exists)
    tl.store(ranges + 1, end, mask=exists)
    tl.store(ranges + 2, masked, mask=exists)


@triton.jit
def _store_ranges(ranges, block_begin, block_end, full_begin, full_end, load_begin, load_end, exists):
    """Stores the ranges and counts of a consumer, whose producer loads the blocks from load_begin to load_end."""
    visited = block_end - block_begin
    masked_first = (full_begin > block_begin) | (full_end == full_begin)
    first_end = tl.where(masked_first, tl.where(full_end > full_begin, full_begin, block_end), full_end)
    _store_range(ranges, block_begin, first_end, masked_first.to(tl.int32), exists)
    full_second = masked_first & (full_end > full_begin)
    _store_range(ranges + 3, full_begin, full_end, block_begin * 0, exists & full_second)
    third = ranges + 3 * (1 + full_second.to(tl.int32))
    last = exists & (full_end > full_begin) & (block_end > full_end)
    _store_range(third, full_end, block_end, block_begin * 0 + 1, last)
    none = visited == 0  # such a consumer skips all blocks before its first one
    counts = ranges + _COUNTS
    tl.store(counts, tl.where(none, load_end, block_begin) - load_begin, mask=exists)
    tl.store(counts + 1, visited, mask=exists)
    tl.store(counts + 2, tl.where(none, 0, load_end - block_end), mask=exists)


@triton.jit
def _make_tiles(lengths, records, left, right, max_tiles, program, TILE: tl.constexpr):
    """The records of _PROGRAM_TILES work tiles."""
    ROWS: tl.constexpr = TILE.BLOCK * TILE.NUM_CONSUMERS
    TRANSPOSED: tl.constexpr = TILE.TRANSPOSED
    NUM_CONSUMERS: tl.constexpr = TILE.NUM_CONSUMERS
    BLOCK: tl.constexpr = TILE.BLOCK
    VISITED: tl.constexpr = TILE.VISITED
    index = program * _PROGRAM_TILES + tl.arange(0, _PROGRAM_TILES)  # [tiles]
    total = 0
    sequence, first_index = index * 0, index * 0
    for chunk in range(0, lengths.num_sequences + 1, _CHUNK):
        other = chunk + tl.arange(0, _CHUNK)  # [sequences]
        _, q_len, _, k_len = _sequences(lengths, other, TRANSPOSED)
        tiles = _num_tiles(q_len, k_len, TILE)
        end = total + tl.cumsum(tiles, 0)
        passed = (end[None, :] <= index[:, None]) & (other <= lengths.num_sequences)[None, :]  # [tiles, sequences]
        sequence += tl.sum(passed.to(tl.int32), 1)
        first_index += tl.sum(tl.where(passed, tiles[None, :], 0), 1)
        total += tl.sum(tiles, 0)
    exists = index < tl.minimum(total, max_tiles)
    q_start, q_len, k_start, k_len = _sequences(lengths, sequence, TRANSPOSED)
    tile = index - first_index
    # Rank: by cost, then by sequence; work tiles of the same sequence by their number.
    cost = _cost(q_len, k_len, tile, right, TILE)
    rank = tile if TRANSPOSED else _num_tiles(q_len, k_len, TILE) - 1 - tile
    for chunk in range(0, lengths.num_sequences + 1, _CHUNK):
        other = chunk + tl.arange(0, _CHUNK)
        _, other_q_len, _, other_k_len = _sequences(lengths, other, TRANSPOSED)
        before = other[None, :] < sequence[:, None]
        limit = cost[:, None] - before.to(tl.int32)
        longer = _num_longer(other_q_len[None, :], other_k_len[None, :], limit, right, TILE)
        rank += tl.sum(tl.where(other[None, :] == sequence[:, None], 0, longer), 1)
    exists = exists & (rank >= 0) & (rank < max_tiles)
    # The record
    diagonal = k_len - q_len
    first = tile * ROWS
    if not TRANSPOSED:
        first -= _padding(q_len, TILE)
    record = records + rank * (_RECORD + NUM_CONSUMERS * _CONSUMER)
    tl.store(record, first, mask=exists)
    tl.store(record + 1, q_start, mask=exists)
    tl.store(record + 2, q_start + q_len, mask=exists)
    tl.store(record + 3, k_start, mask=exists)
    tl.store(record + 4, k_start + k_len, mask=exists)
    tl.store(record + 5, first - diagonal if TRANSPOSED else first + diagonal, mask=exists)
    tl.store(record + 6, k_len - first if TRANSPOSED else k_len, mask=exists)
    tl.store(record + 7, q_start // VISITED + sequence, mask=exists)
    # The blocks it visits
    if TRANSPOSED:
        high = tl.minimum(first + ROWS, k_len) - 1 - diagonal
        begin, end, full_begin, full_end = _visited_blocks(
            first - diagonal, high, right, left, q_len, exists, first + ROWS <= k_len, VISITED
        )  # fmt: skip
        load_begin, load_end = begin, end
        _store_ranges(record + _RECORD, begin, end, full_begin, full_end, begin, end, exists)
    else:
        load_begin, load_end = first * 0 + (1 << 30), first * 0
        for store in tl.static_range(2):
            for w in tl.static_range(NUM_CONSUMERS):
                low = first + w * BLOCK
                high = tl.minimum(low + BLOCK, q_len) - 1
                has_rows = exists & (low >= 0) & (low < q_len)
                begin, end, full_begin, full_end = _visited_blocks(
                    low + diagonal, high + diagonal, left, right, k_len, has_rows, has_rows, VISITED
                )  # fmt: skip
                if store:
                    ranges = record + _RECORD + w * _CONSUMER
                    _store_ranges(ranges, begin, end, full_begin, full_end, load_begin, load_end, exists)
                else:
                    load_begin = tl.where(end > begin, tl.minimum(begin, load_begin), load_begin)
                    load_end = tl.maximum(end, load_end)
            load_begin = tl.minimum(load_begin, load_end)
    tl.store(record + 8, load_begin, mask=exists)
    tl.store(record + 9, load_end, mask=exists)


@triton.jit
def _make_query_blocks(lengths, query_blocks, num_blocks, program, TILE: tl.constexpr):
    """First row and number of rows of _PROGRAM_TILES blocks of queries. Every sequence begins with a new block: number
    s with block q_start // BLOCK + s."""
    block = program * _PROGRAM_TILES + tl.arange(0, _PROGRAM_TILES)
    sequence = block * 0 - 1
    for chunk in range(0, lengths.num_sequences + 1, _CHUNK):
        other = chunk + tl.arange(0, _CHUNK)
        q_start = _start(lengths.cu_q, other, lengths.num_sequences, lengths.tokens_q)
        begun = (q_start // TILE.VISITED + other)[None, :] <= block[:, None]
        sequence += tl.sum((begun & (other <= lengths.num_sequences)[None, :]).to(tl.int32), 1)
    exists = sequence >= 0
    sequence = tl.maximum(sequence, 0)
    q_start, q_len, _, _ = _sequences(lengths, sequence, False)
    first = (block - q_start // TILE.VISITED - sequence) * TILE.VISITED
    rows = tl.where(exists, tl.minimum(tl.maximum(q_len - first, 0), TILE.VISITED), 0)
    tl.store(query_blocks + block * 2, q_start + first, mask=block < num_blocks)
    tl.store(query_blocks + block * 2 + 1, rows, mask=block < num_blocks)


@triton.jit
def _make_lists(lengths, table, grid, max_tiles, program, TILE: tl.constexpr):
    """_ENTRIES entries of the lists: (record, first head) of each program's work tiles, and -1 behind them."""
    STRIDE: tl.constexpr = _RECORD + TILE.NUM_CONSUMERS * _CONSUMER
    total = 0
    for chunk in range(0, lengths.num_sequences + 1, _CHUNK):
        _, q_len, _, k_len = _sequences(lengths, chunk + tl.arange(0, _CHUNK), TILE.TRANSPOSED)
        total += tl.sum(_num_tiles(q_len, k_len, TILE), 0)
    items = tl.minimum(total, max_tiles) * grid.head_group  # of a group
    rounds, rest = items // grid.num_programs, items % grid.num_programs
    entry = program * _ENTRIES + tl.arange(0, _ENTRIES)
    owner, step = entry // grid.max_work_tiles, entry % grid.max_work_tiles
    taken = entry * 0 - 1
    first_head, begin = entry * 0, entry * 0
    for group in range(grid.num_groups):
        # The owner's position in whole rounds, which alternate in direction, and in the last one.
        position = (owner + grid.num_programs - group * grid.num_programs // grid.num_groups) % grid.num_programs
        last_position = tl.where(rounds % 2 == 0, position, grid.num_programs - 1 - position)
        count = rounds + (last_position < rest).to(tl.int32)
        number = step - begin
        this = tl.where(number % 2 == 0, position, grid.num_programs - 1 - position)
        inside = (number >= 0) & (number < count)
        taken = tl.where(inside, number * grid.num_programs + this, taken)
        first_head = tl.where(inside, group * grid.head_group, first_head)
        begin += count
    head = (first_head + taken % grid.head_group) * grid.pack_gqa
    address = table + entry * 2
    exists = owner < grid.num_programs
    record = grid.records + taken // grid.head_group * STRIDE
    tl.store(address, tl.where(taken >= 0, record, -1), mask=exists)
    tl.store(address + 1, tl.where(taken >= 0, head, 0), mask=exists)


@triton.jit
def _make(lengths, table, grid, left, right, max_tiles, program, TILE: tl.constexpr):
    """A program's part of the table of a direction: records of some work tiles, or some entries of the lists."""
    tile_programs = tl.cdiv(max_tiles, _PROGRAM_TILES)
    if program < tile_programs:
        _make_tiles(lengths, table + grid.records, left, right, max_tiles, program, TILE)
    else:
        _make_lists(lengths, table, grid, max_tiles, program - tile_programs, TILE)


SIZES = ("num_sequences", "tokens_q", "tokens_k", "left", "right", "forward_tiles", "forward_programs",
         "backward_tiles", "backward_programs", "num_query_blocks")  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def attention_varlen_schedule(
    cu_seqlens_q, cu_seqlens_k, forward, forward_grid, backward, backward_grid, query_blocks, num_sequences, tokens_q,
    tokens_k, left, right, forward_tiles, forward_programs, backward_tiles, backward_programs, num_query_blocks,
    FORWARD: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """The schedule of both directions, or with BACKWARD None of the forward pass.

    `forward` and `backward` are the tables of the directions, made by so many programs; the grids are `Grid`.
    """
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, num_sequences, tokens_q, tokens_k)
    program = tl.program_id(0)
    if BACKWARD is None:
        _make(lengths, forward, forward_grid, left, right, forward_tiles, program, FORWARD)
    else:
        if program < forward_programs:
            _make(lengths, forward, forward_grid, left, right, forward_tiles, program, FORWARD)
        elif program < forward_programs + backward_programs:
            program -= forward_programs
            _make(lengths, backward, backward_grid, left, right, backward_tiles, program, BACKWARD)
        else:
            program -= forward_programs + backward_programs
            _make_query_blocks(lengths, query_blocks, num_query_blocks, program, BACKWARD)


def make_schedule(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, layout: VarlenLayout, size: int, gradients: bool, left: int, right: int
) -> Tensor:
    """Returns the schedule of packed sequences, int32 [size]; without `gradients` its forward part alone."""
    assert size >= layout.size
    schedule = torch.empty(size, dtype=torch.int32, device=cu_seqlens_q.device)
    forward, backward = (layout.forward_tiles, layout.forward_grid), (layout.backward_tiles, layout.backward_grid)
    counts = [layout.forward_tiles, _num_programs(*forward), 0, 0, 0]
    tables: tuple[Any, ...] = (layout.forward_table(schedule), layout.forward_grid, None, None, None)
    num_programs = counts[1]
    if gradients:
        query_blocks = layout.query_blocks_table(schedule)
        tables = (*tables[:2], layout.backward_table(schedule), layout.backward_grid, query_blocks)
        counts[2:] = layout.backward_tiles, _num_programs(*backward), layout.query_blocks
        num_programs += counts[3] + tune.ceil_div(layout.query_blocks, _PROGRAM_TILES.value)
    launch(
        attention_varlen_schedule, (num_programs,),
        cu_seqlens_q, cu_seqlens_k, *tables, *layout.shape, left, right, *counts,
        FORWARD=layout.forward, BACKWARD=layout.backward if gradients else None, num_warps=4,
    )  # fmt: skip
    return schedule


def _num_programs(tiles: int, grid: Grid) -> int:
    """Programs that make the tables of a direction."""
    entries = tune.ceil_div(grid.num_programs * grid.max_work_tiles, _ENTRIES.value)
    return tune.ceil_div(tiles, _PROGRAM_TILES.value) + entries
