"""Attention backward on Hopper: one pass with five matrix products.

A program holds 128 keys and their values, 64 for each of two warpgroups, and walks over the tiles of queries that see
them, of all heads that share them. Scores are computed turned, S^T = K Q^T and dP^T = V dO^T, so that P^T and dS^T are
in the registers from which the tensor cores read them for dV += P^T dO and dK += dS^T Q. Only dS goes through shared
memory, since dQ = dS K sums over the keys of both warpgroups. They share that product's result by halves, and add it to
a float32 buffer.

dQ of a tile is computed one step late, after dS of the next: neither warpgroup waits for the other's. A product is
always awaited in the step that issues it; ptxas serialises all of them otherwise.
"""

import triton
import triton.language as tl

from flashkernel.blocks.softmax_triton import LOG2E, tanh
from flashkernel.core.gluon import (
    fence_async_shared,
    gl,
    gluon,
    load_tile,
    mbarrier,
    store_tile,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def _keys(tiles, lines, together, pairs):
    """(tile of keys, batch, key head) of a program: first tiles first, since they are the longest under a causal mask,
    for `together` heads at a time."""
    position = gl.program_id(0)
    block = position // (tiles * together)
    inside = position - block * tiles * together
    here = gl.minimum(together, lines - block * together)
    line = block * together + inside % here
    b = line // pairs
    return inside // here, b, line - b * pairs


@gluon.jit
def _load(inputs, buffers, barriers, place, tables, ROWS: gl.constexpr, STAGES: gl.constexpr, JOINT: gl.constexpr):
    """The loading warp. With JOINT, all that a step reads comes and goes at once."""
    q, do, k, v, stats = inputs
    q_tiles, do_tiles, k_tile, v_tile, norm_tiles, delta_tiles = buffers
    kv_full, q_full, q_empty, do_full, do_empty = barriers
    tile, b, pair, group, padded, heads, rows = place
    runs, counts, most_runs, by_batch, by_head = tables
    mbarrier.expect(kv_full.index(0), k.block_type.nbytes + v.block_type.nbytes)
    load_tile(k, [b, tile * 128, pair, 0], kv_full.index(0), k_tile)
    load_tile(v, [b, tile * 128, pair, 0], kv_full.index(0), v_tile)
    loaded = 0
    for member in range(group):
        h = pair * group + member
        row = b.to(gl.int64) * by_batch + h * by_head + tile
        stat = (b * heads + h) * padded
        for run in range(gl.load(counts + row)):
            begin = gl.load(runs + (row * most_runs + run) * 3)
            end = gl.load(runs + (row * most_runs + run) * 3 + 1)
            for index in range(begin, end):
                stage = loaded % STAGES
                phase = (loaded // STAGES) & 1
                q_bar = q_full.index(stage)
                mbarrier.wait(q_empty.index(stage), phase ^ 1)
                if JOINT:
                    do_bar = q_bar
                    mbarrier.expect(q_bar, q.block_type.nbytes + do.block_type.nbytes + 2 * stats.block_type.nbytes)
                else:
                    do_bar = do_full.index(stage)
                    mbarrier.expect(q_bar, q.block_type.nbytes + stats.block_type.nbytes)
                load_tile(q, [b, index * ROWS, h, 0], q_bar, q_tiles.index(stage))
                load_tile(stats, [stat + index * ROWS], q_bar, norm_tiles.index(stage))
                if not JOINT:
                    mbarrier.wait(do_empty.index(stage), phase ^ 1)
                    mbarrier.expect(do_bar, do.block_type.nbytes + stats.block_type.nbytes)
                load_tile(do, [b, index * ROWS, h, 0], do_bar, do_tiles.index(stage))
                load_tile(stats, [rows + stat + index * ROWS], do_bar, delta_tiles.index(stage))
                loaded += 1


@gluon.jit
def _add(dq, offset, part, COLUMNS: gl.constexpr):
    """Add [64, COLUMNS] to a buffer, in the order in which the registers hold it: 16 bytes a thread, side by side.

    Row 16 w + 8 i + r, column 8 j + 2 c + e lies at (j, w, r, c, i, e).
    """
    flat = part.reshape([4, 2, 8, COLUMNS // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([64 * COLUMNS])
    gl.atomic_add(dq + offset + gl.arange(0, 64 * COLUMNS, flat.type.layout), flat, sem="relaxed")


@gluon.jit
def _queries(ds_tile, k_tile, nothing, w: gl.constexpr, ROWS: gl.constexpr, PART: gl.constexpr):
    """Issue this warpgroup's half of dS K, [64, PART]: of the rows where a tile has 128, else of the columns."""
    if ROWS == 128:
        left = ds_tile.slice(w * 64, 64, dim=1).permute((1, 0))  # [64, 128]
        product = warpgroup_mma(left, k_tile, nothing, use_acc=False, is_async=True)
    else:
        half = k_tile.slice(w * PART, PART, dim=1)
        product = warpgroup_mma(ds_tile.permute((1, 0)), half, nothing, use_acc=False, is_async=True)
    return product


@gluon.jit
def _consume(outputs, buffers, barriers, place, tables, numbers, mask_tables, w: gl.constexpr,
             MASK: gl.constexpr, CAP: gl.constexpr, HALF: gl.constexpr, FOLD: gl.constexpr,
             JOINT: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, WIDTH: gl.constexpr,
             VALUES: gl.constexpr):  # fmt: skip
    """Warpgroup `w`: keys 64 w to 64 w + 63 of the program's 128."""
    TURNED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])  # [64 keys, ROWS queries]
    KEYS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    VALS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, VALUES, 16])
    PART: gl.constexpr = WIDTH if ROWS == 128 else WIDTH // 2
    QUERIES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    ALONG: gl.constexpr = gl.SliceLayout(0, TURNED)
    dq, dk, dv = outputs
    q_tiles, do_tiles, k_box, v_box, norm_tiles, delta_tiles, ds_tiles = buffers
    kv_full, q_full, q_empty, do_full, do_empty, ds_full, ds_empty, done = barriers
    tile, b, pair, group, query_tiles, heads = place
    runs, plans, most_runs, by_batch, by_head = tables
    queries, keys, factor, scale, softcap = numbers
    dtype: gl.constexpr = q_tiles.dtype
    k_tile = k_box.reshape([128, WIDTH])
    v_tile = v_box.reshape([128, VALUES])
    own_keys = k_tile.slice(w * 64, 64, dim=0)
    own_values = v_tile.slice(w * 64, 64, dim=0)
    key_sum = gl.zeros([64, WIDTH], gl.float32, KEYS)
    value_sum = gl.zeros([64, VALUES], gl.float32, VALS)
    nothing = gl.zeros([64, ROWS], gl.float32, TURNED)
    no_queries = gl.zeros([64, PART], gl.float32, QUERIES)
    # The first step adds zeros to a tile: there is no dS before it.
    ds_tiles.index(0).slice(w * 64, 64, dim=0).store(nothing.to(dtype))
    fence_async_shared()
    mbarrier.arrive(ds_full.index(0), count=1)
    base = (b * heads + pair * group) * query_tiles  # the head's first tile of queries
    target = base  # the tile of the step before
    step = 0
    mbarrier.wait(kv_full.index(0), 0)
    for member in range(group):
        h = pair * group + member
        row = b.to(gl.int64) * by_batch + h * by_head + tile
        left = gl.load(plans + row * 3 + 1)
        run = (row * most_runs * 3).to(gl.int32)
        index = gl.load(runs + run) - 1
        end = gl.load(runs + run + 1)
        masked = gl.load(runs + run + 2)
        while left > 0:
            stage = step % STAGES
            phase = (step // STAGES) & 1
            before = step & 1  # buffer of dS of the step before; this one's is the other
            index += 1
            if index == end:  # the next run
                run += 3
                index = gl.load(runs + run)
                end = gl.load(runs + run + 1)
                masked = gl.load(runs + run + 2)
            mbarrier.wait(q_full.index(stage), phase)
            if not JOINT:
                mbarrier.wait(do_full.index(stage), phase)
            q_tile = q_tiles.index(stage).reshape([ROWS, WIDTH])
            do_tile = do_tiles.index(stage).reshape([ROWS, VALUES])
            if FOLD:  # the products start from what would be subtracted from them
                norm = nothing + norm_tiles.index(stage).load(ALONG)[None, :]  # [64, ROWS]
                shift = nothing + delta_tiles.index(stage).load(ALONG)[None, :]
                s_later = warpgroup_mma(own_keys, q_tile.permute((1, 0)), norm, is_async=True)
                dp_later = warpgroup_mma(own_values, do_tile.permute((1, 0)), shift, is_async=True)
                p = gl.exp2(warpgroup_mma_wait(1, deps=[s_later]) * factor)
            else:
                s_later = warpgroup_mma(own_keys, q_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
                dp_later = warpgroup_mma(own_values, do_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
                s = warpgroup_mma_wait(1, deps=[s_later])
                norm = norm_tiles.index(stage).load(ALONG)[None, :]  # [1, ROWS]
                if CAP:
                    bent = tanh(s * (scale / softcap))
                    p = gl.exp2(bent * (softcap * LOG2E) + norm)
                else:
                    p = gl.exp2(s * factor + norm)
            if masked != 0:
                query = index * ROWS + gl.arange(0, ROWS, ALONG)[None, :]  # [1, ROWS]
                key = tile * 128 + w * 64 + gl.arange(0, 64, gl.SliceLayout(1, TURNED))[:, None]  # [64, 1]
                seen = key < keys
                if MASK is not None:
                    seen = seen & MASK(b, h, query, key, queries, keys, mask_tables)
                p = gl.where(seen, p, 0.0)
            p_half = p.to(dtype)
            dp = warpgroup_mma_wait(0, deps=[dp_later])
            operand = gl.convert_layout(p_half, gl.DotOperandLayout(0, VALS, 2))
            value_later = warpgroup_mma(operand, do_tile, value_sum, is_async=True)
            if not FOLD:
                dp += delta_tiles.index(stage).load(ALONG)[None, :]
            if CAP:
                ds = p * (1 - bent * bent) * dp
            elif HALF:
                ds = p_half.to(gl.float32) * dp
            else:
                ds = p * dp
            ds_half = ds.to(dtype)
            if JOINT:  # who has handed back the step before has read the dS of the one before that
                last = gl.maximum(step - 1, 0)
                mbarrier.wait(q_empty.index(last % STAGES), (last // STAGES) & 1, pred=step > 0)
            else:
                mbarrier.wait(ds_empty.index(1 - before), (((step + 1) // 2) & 1) ^ 1)
            ds_tiles.index(1 - before).slice(w * 64, 64, dim=0).store(ds_half)
            fence_async_shared()
            mbarrier.arrive(ds_full.index(1 - before), count=1)
            mbarrier.wait(ds_full.index(before), (step // 2) & 1)
            query_later = _queries(ds_tiles.index(before), k_tile, no_queries, w, ROWS, PART)
            operand = gl.convert_layout(ds_half, gl.DotOperandLayout(0, KEYS, 2))
            key_later = warpgroup_mma(operand, q_tile, key_sum, is_async=True)
            value_sum, query_sum = warpgroup_mma_wait(1, deps=[value_later, query_later])
            if not JOINT:
                mbarrier.arrive(do_empty.index(stage), count=1)
                mbarrier.arrive(ds_empty.index(before), count=1)
            _add(dq, (target.to(gl.int64) * 2 + w) * (64 * PART), query_sum, PART)
            target = base + index
            key_sum = warpgroup_mma_wait(0, deps=[key_later])
            mbarrier.arrive(q_empty.index(stage), count=1)
            step += 1
            left -= 1
        base += query_tiles
    mbarrier.wait(ds_full.index(step & 1), (step // 2) & 1)
    query_later = _queries(ds_tiles.index(step & 1), k_tile, no_queries, w, ROWS, PART)
    # dK and dV leave through the buffers of K and V; of V each warpgroup has read its own rows only.
    own_values.store(value_sum.to(dtype))
    fence_async_shared()
    query_sum = warpgroup_mma_wait(0, deps=[query_later])
    mbarrier.arrive(done.index(0), count=1)
    _add(dq, (target.to(gl.int64) * 2 + w) * (64 * PART), query_sum, PART)
    mbarrier.wait(done.index(0), 0)  # both have read K for the last time
    if w == 1:
        store_tile(dv, [b, tile * 128, pair, 0], v_box)
    own_keys.store((key_sum * scale).to(dtype))
    fence_async_shared()
    mbarrier.arrive(done.index(0), count=1)
    mbarrier.wait(done.index(0), 1)
    if w == 0:
        store_tile(dk, [b, tile * 128, pair, 0], k_box)
    tma.store_wait(0)


# Whether these are multiples of 16 makes no difference here, and would only compile the kernel again.
_SIZES = (
    "most_runs", "most_loads", "by_batch", "by_head", "tiles", "lines", "together", "pairs", "query_tiles", "queries",
    "keys",
)  # fmt: skip


@gluon.jit(do_not_specialize_on_alignment=_SIZES)
def attention_backward(
    dq, q, do, k, v, stats, dk, dv, mask_tables, runs, plans, loads, counts, most_runs, most_loads,
    by_batch, by_head, tiles, lines, together, pairs, group, query_tiles, queries, keys, factor, scale, softcap,
    MASK: gl.constexpr, CAP: gl.constexpr, HALF: gl.constexpr, FOLD: gl.constexpr,
    JOINT: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, WIDTH: gl.constexpr, VALUES: gl.constexpr,
):  # fmt: skip
    k_tile = gl.allocate_shared_memory(k.dtype, [1, 128, 1, WIDTH], k.layout)
    v_tile = gl.allocate_shared_memory(v.dtype, [1, 128, 1, VALUES], v.layout)
    q_tiles = gl.allocate_shared_memory(q.dtype, [STAGES, 1, ROWS, 1, WIDTH], q.layout)
    do_tiles = gl.allocate_shared_memory(do.dtype, [STAGES, 1, ROWS, 1, VALUES], do.layout)
    norm_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], stats.layout)
    delta_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], stats.layout)
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([128, ROWS], q.dtype)
    ds_tiles = gl.allocate_shared_memory(q.dtype, [2, 128, ROWS], DS)
    kv_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    do_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ds_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full.index(0), count=1)
    mbarrier.init(done.index(0), count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(q_full.index(stage), count=1)
        mbarrier.init(do_full.index(stage), count=1)
        mbarrier.init(q_empty.index(stage), count=2)
        mbarrier.init(do_empty.index(stage), count=2)
    for side in gl.static_range(2):
        mbarrier.init(ds_full.index(side), count=2)
        mbarrier.init(ds_empty.index(side), count=2)
    tile, b, pair = _keys(tiles, lines, together, pairs)
    heads = pairs * group
    inputs = (q, do, k, v, stats)
    outputs = (dq, dk, dv)
    sources = (q_tiles, do_tiles, k_tile, v_tile, norm_tiles, delta_tiles)
    buffers = (q_tiles, do_tiles, k_tile, v_tile, norm_tiles, delta_tiles, ds_tiles)
    loading = (kv_full, q_full, q_empty, do_full, do_empty)
    barriers = (kv_full, q_full, q_empty, do_full, do_empty, ds_full, ds_empty, done)
    place = (tile, b, pair, group, query_tiles, heads)
    loaded = (tile, b, pair, group, query_tiles * ROWS, heads, lines * group * query_tiles * ROWS)
    tables = (loads, counts, most_loads, by_batch, by_head)
    walked = (runs, plans, most_runs, by_batch, by_head)
    numbers = (queries, keys, factor, scale, softcap)
    gl.warp_specialize([
        (_load, (inputs, sources, loading, loaded, tables, ROWS, STAGES, JOINT)),
        (_consume, (outputs, buffers, barriers, place, walked, numbers, mask_tables, 0,
                    MASK, CAP, HALF, FOLD, JOINT, ROWS, STAGES, WIDTH, VALUES)),
        (_consume, (outputs, buffers, barriers, place, walked, numbers, mask_tables, 1,
                    MASK, CAP, HALF, FOLD, JOINT, ROWS, STAGES, WIDTH, VALUES)),
    ], [4, 4], [240, 240])  # fmt: skip


@triton.jit
def attention_prepare(
    o, do, lse, dlse, sinks, stats, dq, dsinks, do_batch, do_seq, do_head, heads, queries, padded, unit,
    HAS_DLSE: tl.constexpr, HAS_SINKS: tl.constexpr, BLOCK: tl.constexpr, VALUES: tl.constexpr, BLOCK_V: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """What is added to S and dP: -lse in units of 1 / `unit`, and -delta = dlse - sum(o do); a dq of zeros.

    `stats` has first the one and then the other, for rows up to a whole number of tiles. Those that are not there or
    see nothing get an lse of +inf, which leaves no probability. Heads come first in the grid: what neighbouring
    programs read lies side by side. The first batch comes last, and is in L2 when the next kernel begins with it.
    """
    h = tl.program_id(0)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    b = (tl.num_programs(2) - 1 - tl.program_id(2)).to(tl.int64)
    column = tl.arange(0, BLOCK_V)[None, :]
    inside = (row < queries)[:, None] & (column < VALUES)
    output = tl.load(o + ((b * queries + row[:, None]) * heads + h) * VALUES + column, mask=inside, other=0.0)
    upstream = tl.load(
        do + b * do_batch + h * do_head + row[:, None].to(tl.int64) * do_seq + column, mask=inside, other=0.0
    )
    shift = tl.sum(output.to(tl.float32) * upstream.to(tl.float32), 1)
    stat = (b * heads + h) * queries + row
    if HAS_DLSE:
        shift -= tl.load(dlse + stat, mask=row < queries, other=0.0)
    value = tl.load(lse + stat, mask=row < queries, other=float("-inf"))
    value = tl.where(value == float("-inf"), float("inf"), value)
    place = (b * heads + h) * padded + row
    total = tl.num_programs(2).to(tl.int64) * heads * padded
    tl.store(stats + place, -value * unit, mask=row < padded)
    tl.store(stats + total + place, -shift, mask=row < padded)
    if HAS_SINKS:  # a sink's probability is exp(sink - lse), and what it would add to the output is nothing
        share = tl.exp2((tl.load(sinks + h).to(tl.float32) - value) * LOG2E)
        tl.store(dsinks + (b * heads + h) * tl.num_programs(1) + tl.program_id(1), -tl.sum(share * shift, 0))
    width = tl.arange(0, WIDTH)[None, :]
    zeros = tl.zeros([BLOCK, WIDTH], tl.float32)
    tl.store(dq + place[:, None] * WIDTH + width, zeros, mask=(row < padded)[:, None])


@triton.jit
def attention_finish(
    buffer, dq, scale, heads, queries, query_tiles,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """dq from its buffer, where each half of a tile has the order of the registers that were added to it (`_add`).

    The last batch, to which was added last, comes first: it is still in L2.
    """
    h = tl.program_id(0)
    tile = tl.program_id(1)
    b = (tl.num_programs(2) - 1 - tl.program_id(2)).to(tl.int64)
    start = buffer + ((b * heads + h) * query_tiles + tile) * (ROWS * BLOCK)
    value = tl.load(start + tl.arange(0, ROWS * BLOCK)) * scale
    value = value.to(dq.dtype.element_ty).reshape([2, PART // 8, 4, 8, 4, 2, 2])  # (half, j, w, r, c, i, e)
    if ROWS == 128:
        value = tl.permute(value, (0, 2, 5, 3, 1, 4, 6)).reshape([ROWS, BLOCK])
    else:
        value = tl.permute(value, (2, 5, 3, 0, 1, 4, 6)).reshape([ROWS, BLOCK])
    row = tile * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    place = (b * queries + row) * heads + h
    tl.store(dq + place * WIDTH + column, value, mask=(row < queries) & (column < WIDTH))
