"""Attention backward on Hopper: one pass with five matrix products.

A program stays on its multiprocessor and takes one item after another, in an order made on the host: 128 keys and their
values, 64 for each of two warpgroups, against the tiles of queries that see them, of all heads that share them. Scores
are computed turned, S^T = K Q^T and dP^T = V dO^T, so that P^T and dS^T are in the registers from which the tensor
cores read them for dV += P^T dO and dK += dS^T Q. Only dS goes through shared memory, since dQ = dS K sums over the
keys of both warpgroups. It is added to a float32 buffer, by one of three ways:

- each warpgroup computes half of a tile's dQ, one step late, after dS of the next: neither waits for the other's. It
  adds its half from registers.
- SENT, it leaves its half in shared memory, from where the TMA unit adds it: registers are free at once.
- APART, a third warpgroup computes dQ^T = K^T dS. It takes registers that only narrow heads and tiles leave.

A product is always awaited in the step that issues it; ptxas serialises all of them otherwise.
"""

from triton.language.extra.cuda import gdc_wait

from flashkernel.blocks.pdl_triton import pdl_enter
from flashkernel.blocks.softmax_triton import LOG2E, tanh
from flashkernel.core.gluon import (
    add_tile,
    consumer_release,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    new_barriers,
    synchronize,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashkernel.ops.attention.hopper.backward_parts import add, load_steps, multiply_queries, seen_by, walk_of
from flashkernel.ops.attention.hopper.schedule import further, item_at


@gluon.jit
def _add_half(dq, target, part, dq_tiles, w: gl.constexpr, ROWS: gl.constexpr, PART: gl.constexpr, SENT: gl.constexpr):
    """Add this warpgroup's half of a tile to a buffer: from registers, or SENT through shared memory."""
    if SENT:
        tma.store_wait(0)
        dq_tiles.index(w).store(part)
        fence_async_shared()
        add_tile(dq, [target * ROWS + w * 64, 0], dq_tiles.index(w))
    else:
        add(dq, target * 2 + w, part, PART)


@gluon.jit
def _return(barrier, THREADS: gl.constexpr):
    """A warpgroup arrives, as one or, where that is faster, with every thread; the barrier must count accordingly."""
    if THREADS:
        consumer_release(barrier)
    else:
        mbarrier.arrive(barrier, count=1)


@gluon.jit
def _item(dq, buffers, barriers, item, walk, orders, turn, step, shape, tables, numbers, mask_tables, side,
          w: gl.constexpr, MASK: gl.constexpr, TRAITS: gl.constexpr, CAP: gl.constexpr, FOLD_NORM: gl.constexpr,
          FOLD_DELTA: gl.constexpr, APART: gl.constexpr, SENT: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
          HELD: gl.constexpr, WIDTH: gl.constexpr, VALUES: gl.constexpr):  # fmt: skip
    """Warpgroup `w`: keys 64 w to 64 w + 63 of an item's 128. Gives (steps so far, the next item, its first walk).

    Buffers and phases go on from item to item with the steps. An item's last dQ is computed when it ends; its first
    step finds no dS before it, and multiplies an old one for nothing.
    """
    TURNED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])  # [64 keys, ROWS queries]
    KEYS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    VALS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, VALUES, 16])
    PART: gl.constexpr = WIDTH if ROWS == 128 else WIDTH // 2
    QUERIES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    ALONG: gl.constexpr = gl.SliceLayout(0, TURNED)
    q_tiles, do_tiles, k_boxes, v_boxes, norm_tiles, delta_tiles, ds_tiles, dq_tiles = buffers
    kv_full, kv_done, q_full, q_empty, ds_full, ds_empty, k_read = barriers
    tile, b, pair = item
    group, query_tiles, heads = shape
    queries, keys, factor, scale, softcap = numbers
    runs, _, _, _, _ = tables
    dtype: gl.constexpr = q_tiles.dtype
    k_tile = k_boxes.index(side).reshape([128, WIDTH])
    v_tile = v_boxes.index(side).reshape([128, VALUES])
    own_keys = k_tile.slice(w * 64, 64, dim=0)
    own_values = v_tile.slice(w * 64, 64, dim=0)
    key_sum = gl.zeros([64, WIDTH], gl.float32, KEYS)
    value_sum = gl.zeros([64, VALUES], gl.float32, VALS)
    nothing = gl.zeros([64, ROWS], gl.float32, TURNED)
    no_queries = gl.zeros([64, PART], gl.float32, QUERIES)
    base = (b * heads + pair * group) * query_tiles  # the head's first tile of queries
    target = gl.to_tensor(-1)  # the tile of the step before
    mbarrier.wait(kv_full.index(side), (turn // HELD) & 1)
    for member in range(group):
        h = pair * group + member
        if member > 0:
            walk = walk_of(item, member, group, tables)
        left, run, index, end, masked = walk
        while left > 0:
            stage = step % STAGES
            before = step & 1  # buffer of dS of the step before; this one's is the other
            run, index, end, masked = further(run, index, end, masked, runs)
            mbarrier.wait(q_full.index(stage), (step // STAGES) & 1)
            q_tile = q_tiles.index(stage).reshape([ROWS, WIDTH])
            do_tile = do_tiles.index(stage).reshape([ROWS, VALUES])
            start, shift = nothing, nothing  # folded, the products start from what would be subtracted from them
            if FOLD_NORM:
                start = gl.broadcast(norm_tiles.index(stage).load(ALONG)[None, :], nothing)[0]  # [64, ROWS]
            s_later = warpgroup_mma(own_keys, q_tile.permute((1, 0)), start, use_acc=FOLD_NORM, is_async=True)
            if FOLD_DELTA:
                shift = gl.broadcast(delta_tiles.index(stage).load(ALONG)[None, :], nothing)[0]
            dp_later = warpgroup_mma(own_values, do_tile.permute((1, 0)), shift, use_acc=FOLD_DELTA, is_async=True)
            s = warpgroup_mma_wait(1, deps=[s_later])
            if FOLD_NORM:
                p = gl.exp2(s * factor)
            else:
                norm = norm_tiles.index(stage).load(ALONG)[None, :]  # [1, ROWS]
                if CAP:
                    bent = tanh(s * (scale / softcap))
                    p = gl.exp2(bent * (softcap * LOG2E) + norm)
                else:
                    p = gl.exp2(s * factor + norm)
            if masked != 0:
                seen = seen_by(
                    b, h, index * ROWS, tile * 128 + w * 64, queries, keys, mask_tables, MASK, TRAITS, ROWS, TURNED
                )
                p = gl.where(seen, p, 0.0)
            p_half = p.to(dtype)
            dp = warpgroup_mma_wait(0, deps=[dp_later])
            operand = gl.convert_layout(p_half, gl.DotOperandLayout(0, VALS, 2))
            value_later = warpgroup_mma(operand, do_tile, value_sum, is_async=True)
            if not FOLD_DELTA:
                dp += delta_tiles.index(stage).load(ALONG)[None, :]
            if CAP:
                ds = p * (1 - bent * bent) * dp
            else:
                ds = p * dp
            ds_half = ds.to(dtype)
            if APART:
                mbarrier.wait(ds_empty.index(1 - before), (((step + 1) >> 1) & 1) ^ 1)
            else:  # who has handed back the step before has read the dS of the one before that
                last = step + 2 * STAGES - 1  # a round further, where it has the same stage and phase
                mbarrier.wait(q_empty.index(last % STAGES), (last // STAGES) & 1)
            ds_tiles.index(1 - before).slice(w * 64, 64, dim=0).store(ds_half)
            fence_async_shared()
            _return(ds_full.index(1 - before), APART)
            operand = gl.convert_layout(ds_half, gl.DotOperandLayout(0, KEYS, 2))
            if APART:
                key_later = warpgroup_mma(operand, q_tile, key_sum, is_async=True)
                value_sum, key_sum = warpgroup_mma_wait(0, deps=[value_later, key_later])
            else:
                mbarrier.wait(ds_full.index(before), (step >> 1) & 1)
                query_later = multiply_queries(ds_tiles.index(before), k_tile, no_queries, w, ROWS, PART)
                key_later = warpgroup_mma(operand, q_tile, key_sum, is_async=True)
                value_sum, query_sum = warpgroup_mma_wait(1, deps=[value_later, query_later])
                if target >= 0:
                    _add_half(dq, target, query_sum, dq_tiles, w, ROWS, PART, SENT)
                target = base + index
                key_sum = warpgroup_mma_wait(0, deps=[key_later])
            _return(q_empty.index(stage), ROWS == 64)
            step += 1
            left -= 1
        base += query_tiles
    item = item_at(orders, turn + 1)
    # dK and dV leave through the buffers of K and V; of V each warpgroup has read its own rows only.
    if APART:
        own_values.store(value_sum.to(dtype))
        walk = walk_of(item, 0, group, tables)
    else:
        mbarrier.wait(ds_full.index(step & 1), (step >> 1) & 1)
        query_later = multiply_queries(ds_tiles.index(step & 1), k_tile, no_queries, w, ROWS, PART)
        own_values.store(value_sum.to(dtype))
        query_sum = warpgroup_mma_wait(0, deps=[query_later])
        mbarrier.arrive(k_read.index(side), count=1)
        walk = walk_of(item, 0, group, tables)
        if target >= 0:
            _add_half(dq, target, query_sum, dq_tiles, w, ROWS, PART, SENT)
    mbarrier.wait(k_read.index(side), (turn // HELD) & 1)  # all have read K for the last time
    own_keys.store((key_sum * scale).to(dtype))
    fence_async_shared()
    mbarrier.arrive(kv_done.index(side), count=1)
    return step, item, walk


@gluon.jit
def _consume(dq, buffers, barriers, orders, shape, tables, numbers, mask_tables, w: gl.constexpr,
             MASK: gl.constexpr, TRAITS: gl.constexpr, CAP: gl.constexpr, FOLD_NORM: gl.constexpr,
             FOLD_DELTA: gl.constexpr, APART: gl.constexpr, SENT: gl.constexpr, ROWS: gl.constexpr,
             STAGES: gl.constexpr, HELD: gl.constexpr, WIDTH: gl.constexpr, VALUES: gl.constexpr,
             PDL: gl.constexpr):  # fmt: skip
    """A warpgroup. Tiles of 64 queries have code for each buffer of keys and values, at addresses that the compiler
    knows: the loop over steps is a tenth shorter. Tiles of 128 are shorter of registers, which it takes."""
    group, _, _ = shape
    _, _, _, _, ds_full, _, _ = barriers
    _return(ds_full.index(0), APART)  # what the very first step finds before it
    if PDL:
        gdc_wait()  # what is added to must have been cleared
    COPIES: gl.constexpr = HELD if ROWS == 64 else 1
    step = 0
    turn = 0
    item = item_at(orders, 0)
    walk = walk_of(item, 0, group, tables)
    while item[0] >= 0:
        for copy in gl.static_range(COPIES):
            if item[0] >= 0:
                if COPIES == HELD:
                    side = copy
                else:
                    side = turn % HELD
                step, item, walk = _item(dq, buffers, barriers, item, walk, orders, turn, step, shape, tables, numbers,
                                         mask_tables, side, w, MASK, TRAITS, CAP, FOLD_NORM, FOLD_DELTA, APART, SENT,
                                         ROWS, STAGES, HELD, WIDTH, VALUES)  # fmt: skip
                turn += 1
    if SENT:
        tma.store_wait(0)


@gluon.jit
def _consume_queries(dq, buffers, barriers, orders, shape, tables, ROWS: gl.constexpr, HELD: gl.constexpr,
                     WIDTH: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """The third warpgroup, with APART: dQ^T = K^T dS of every step, with K^T in registers for a whole item."""
    QUERIES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])  # [WIDTH, ROWS]
    _, _, k_boxes, _, _, _, ds_tiles, _ = buffers
    kv_full, _, _, _, ds_full, ds_empty, k_read = barriers
    group, query_tiles, heads = shape
    runs, _, _, _, _ = tables
    nothing = gl.zeros([WIDTH, ROWS], gl.float32, QUERIES)
    consumer_release(ds_empty.index(0))  # what the very first step finds before it
    if PDL:
        gdc_wait()  # what is added to must have been cleared
    step = 0
    turn = 0
    item = item_at(orders, 0)
    while item[0] >= 0:
        side = turn % HELD
        _, b, pair = item
        base = (b * heads + pair * group) * query_tiles  # the head's first tile of queries
        mbarrier.wait(kv_full.index(side), (turn // HELD) & 1)
        k_turned = k_boxes.index(side).reshape([128, WIDTH]).permute((1, 0)).load(gl.DotOperandLayout(0, QUERIES, 2))
        for member in range(group):
            left, run, index, end, masked = walk_of(item, member, group, tables)
            while left > 0:
                step += 1
                run, index, end, masked = further(run, index, end, masked, runs)
                mbarrier.wait(ds_full.index(step & 1), (step >> 1) & 1)
                later = warpgroup_mma(k_turned, ds_tiles.index(step & 1), nothing, use_acc=False, is_async=True)
                product = warpgroup_mma_wait(0, deps=[later])
                consumer_release(ds_empty.index(step & 1))
                add(dq, base + index, product, ROWS)
                left -= 1
            base += query_tiles
        mbarrier.arrive(k_read.index(side), count=1)
        turn += 1
        item = item_at(orders, turn)


# Whether these are multiples of 16 makes no difference here, and would only compile the kernel again.
_SIZES = (
    "most_runs", "most_loads", "by_batch", "by_head", "most_items", "lines", "pairs", "query_tiles", "queries", "keys",
)  # fmt: skip


@gluon.jit(do_not_specialize_on_alignment=_SIZES)
def attention_backward(
    dq, q, do, k, v, stats, dk, dv, mask_tables, runs, plans, loads, counts, orders, most_runs, most_loads,
    by_batch, by_head, most_items, lines, pairs, group, query_tiles, queries, keys, factor, scale, softcap,
    MASK: gl.constexpr, TRAITS: gl.constexpr, CAP: gl.constexpr, FOLD_NORM: gl.constexpr, FOLD_DELTA: gl.constexpr,
    APART: gl.constexpr, SENT: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, HELD: gl.constexpr,
    WIDTH: gl.constexpr, VALUES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    k_boxes = gl.allocate_shared_memory(k.dtype, [HELD, 1, 128, 1, WIDTH], k.layout)
    v_boxes = gl.allocate_shared_memory(v.dtype, [HELD, 1, 128, 1, VALUES], v.layout)
    q_tiles = gl.allocate_shared_memory(q.dtype, [STAGES, 1, ROWS, 1, WIDTH], q.layout)
    do_tiles = gl.allocate_shared_memory(do.dtype, [STAGES, 1, ROWS, 1, VALUES], do.layout)
    norm_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], stats.layout)
    delta_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], stats.layout)
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([128, ROWS], q.dtype)
    ds_tiles = gl.allocate_shared_memory(q.dtype, [2, 128, ROWS], DS)
    dq_tiles = ds_tiles  # not used
    if SENT:
        dq_tiles = gl.allocate_shared_memory(gl.float32, [2, 64, WIDTH], dq.layout)
    kv_full = new_barriers(HELD, 1)
    kv_done = new_barriers(HELD, 2)
    q_full = new_barriers(STAGES, 1)
    q_empty = new_barriers(STAGES, 256 if ROWS == 64 else 2)
    ds_full = new_barriers(2, 256 if APART else 2)
    ds_empty = new_barriers(2, 128)
    k_read = new_barriers(HELD, 1 if APART else 2)
    if PDL:
        pdl_enter()
    synchronize()  # else the compiler does so in the loading warp's loops, since these are what it waits for
    heads = pairs * group
    inputs = (q, do, k, v, stats)
    outputs = (dq, dk, dv)
    sources = (q_tiles, do_tiles, k_boxes, v_boxes, norm_tiles, delta_tiles)
    buffers = (q_tiles, do_tiles, k_boxes, v_boxes, norm_tiles, delta_tiles, ds_tiles, dq_tiles)
    loading = (kv_full, kv_done, q_full, q_empty, q_full, q_empty)
    barriers = (kv_full, kv_done, q_full, q_empty, ds_full, ds_empty, k_read)
    own_orders = orders + gl.program_id(0) * most_items * 3
    loaded = (group, query_tiles * ROWS, heads, lines * group * query_tiles * ROWS)
    walked = (group, query_tiles, heads)
    sources_of = (loads, counts, most_loads, by_batch, by_head)
    tables = (runs, plans, most_runs, by_batch, by_head)
    numbers = (queries, keys, factor, scale, softcap)
    if APART:
        gl.warp_specialize([
            (load_steps, (inputs, outputs, sources, loading, own_orders, loaded, sources_of, ROWS, STAGES, True, HELD,
                     PDL)),
            (_consume, (dq, buffers, barriers, own_orders, walked, tables, numbers, mask_tables, 0, MASK, TRAITS, CAP,
                        FOLD_NORM, FOLD_DELTA, APART, SENT, ROWS, STAGES, HELD, WIDTH, VALUES, PDL)),
            (_consume, (dq, buffers, barriers, own_orders, walked, tables, numbers, mask_tables, 1, MASK, TRAITS, CAP,
                        FOLD_NORM, FOLD_DELTA, APART, SENT, ROWS, STAGES, HELD, WIDTH, VALUES, PDL)),
            (_consume_queries, (dq, buffers, barriers, own_orders, walked, tables, ROWS, HELD, WIDTH, PDL)),
        ], [4, 4, 4], [192, 192, 104])  # fmt: skip
    else:
        gl.warp_specialize([
            (load_steps, (inputs, outputs, sources, loading, own_orders, loaded, sources_of, ROWS, STAGES, True, HELD,
                     PDL)),
            (_consume, (dq, buffers, barriers, own_orders, walked, tables, numbers, mask_tables, 0, MASK, TRAITS, CAP,
                        FOLD_NORM, FOLD_DELTA, APART, SENT, ROWS, STAGES, HELD, WIDTH, VALUES, PDL)),
            (_consume, (dq, buffers, barriers, own_orders, walked, tables, numbers, mask_tables, 1, MASK, TRAITS, CAP,
                        FOLD_NORM, FOLD_DELTA, APART, SENT, ROWS, STAGES, HELD, WIDTH, VALUES, PDL)),
        ], [4, 4], [240, 240])  # fmt: skip
