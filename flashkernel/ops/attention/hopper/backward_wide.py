"""Attention backward on Hopper for heads wider than 128: one pass with five matrix products, shared out by roles.

As in backward.py, a program stays on its multiprocessor and takes one item after another: here 64 keys and their
values, whose dK and dV of 256 columns fill the accumulators of a warpgroup each. Both warpgroups work on the same 64
keys and the same tiles of 64 queries:

- the values' one computes S^T = K Q^T and P^T, hands P^T on, and adds up dV += P^T dO;
- the keys' one computes dP^T = V dO^T, takes P^T, hands dS^T on, and adds up dK += dS^T Q.

P^T is handed on in float32, from a thread to the thread in the same place: nothing is rounded, and no bank of shared
memory is asked twice. dQ = dS K is shared by halves of its columns and added to a float32 buffer. The values'
warpgroup multiplies its half one step late, so that it never waits for the other: while one computes exponentials, the
other has products under way.
"""

from triton.language.extra.cuda import gdc_wait

from flashkernel.blocks.pdl_triton import pdl_enter
from flashkernel.blocks.softmax_triton import LOG2E, tanh
from flashkernel.core.gluon import (
    consumer_release,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    new_barriers,
    synchronize,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashkernel.ops.attention.hopper.backward_parts import add, load_steps, multiply_queries, seen_by, walk_of
from flashkernel.ops.attention.hopper.schedule import further, item_at


@gluon.jit
def _flat(p):
    """[64 * 64] in the order in which the registers hold it: row 16 w + 8 i + r, column 8 j + 2 c + e lies at
    (j, w, r, c, i, e)."""
    return p.reshape([4, 2, 8, 8, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([4096])


@gluon.jit
def _unflat(flat, TURNED: gl.constexpr):
    """[64, 64] from what `_flat` gave: every thread has what the one in its place had."""
    return gl.convert_layout(flat.reshape([8, 4, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5)).reshape([64, 64]), TURNED)


@gluon.jit
def _values(dq, buffers, barriers, orders, shape, tables, numbers, mask_tables, MASK: gl.constexpr,
            TRAITS: gl.constexpr, CAP: gl.constexpr, STAGES: gl.constexpr, WIDTH: gl.constexpr,
            VALUES: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """The values' warpgroup: P, dV, and the left half of dQ.

    An item's last dQ is computed when it ends; its first step finds no dS before it, and multiplies an old one for
    nothing.
    """
    TURNED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])  # [64 keys, 64 queries]
    VALS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, VALUES, 16])
    QUERIES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH // 2, 16])
    q_tiles, do_tiles, k_boxes, v_boxes, norm_tiles, _, p_tiles, ds_tiles = buffers
    kv_full, kv_done, q_full, _, do_full, do_empty, p_full, ds_full, k_read = barriers
    group, query_tiles, heads = shape
    queries, keys, factor, scale, softcap = numbers
    runs, _, _, _, _ = tables
    dtype: gl.constexpr = q_tiles.dtype
    k_tile = k_boxes.index(0).reshape([64, WIDTH])
    v_tile = v_boxes.index(0).reshape([64, VALUES])
    nothing = gl.zeros([64, 64], gl.float32, TURNED)
    no_queries = gl.zeros([64, WIDTH // 2], gl.float32, QUERIES)
    if PDL:
        gdc_wait()  # what is added to must have been cleared
    step = 0
    turn = 0
    item = item_at(orders, 0)
    while item[0] >= 0:
        tile, b, pair = item
        value_sum = gl.zeros([64, VALUES], gl.float32, VALS)
        base = (b * heads + pair * group) * query_tiles  # the head's first tile of queries
        target = gl.to_tensor(-1)  # the tile of the step before
        mbarrier.wait(kv_full.index(0), turn & 1)
        for member in range(group):
            left, run, index, end, masked = walk_of(item, member, group, tables)
            while left > 0:
                stage = step % STAGES
                phase = (step // STAGES) & 1
                before = (step + 1) & 1  # buffer of dS of the step before
                run, index, end, masked = further(run, index, end, masked, runs)
                mbarrier.wait(q_full.index(stage), phase)
                q_tile = q_tiles.index(stage).reshape([64, WIDTH])
                do_tile = do_tiles.index(stage).reshape([64, VALUES])
                s_later = warpgroup_mma(k_tile, q_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
                norm = norm_tiles.index(stage).load(gl.SliceLayout(0, TURNED))[None, :]  # [1, 64]
                s = warpgroup_mma_wait(0, deps=[s_later])
                if CAP:
                    bent = tanh(s * (scale / softcap))
                    p = gl.exp2(bent * (softcap * LOG2E) + norm)
                else:
                    p = gl.exp2(s * factor + norm)
                if masked != 0:
                    h = pair * group + member
                    seen = seen_by(b, h, index * 64, tile * 64, queries, keys, mask_tables, MASK, TRAITS, 64, TURNED)
                    p = gl.where(seen, p, 0.0)
                operand = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, VALS, 2))
                mbarrier.wait(ds_full.index(before), ((step - 1) >> 1) & 1)  # the other has read P of the step before
                if CAP:
                    p_tiles.index(0).store(_flat(p * (1 - bent * bent)))
                else:
                    p_tiles.index(0).store(_flat(p))
                mbarrier.arrive(p_full.index(0), count=1)
                mbarrier.wait(do_full.index(stage), phase)
                query_later = multiply_queries(ds_tiles.index(before), k_tile, no_queries, 0, 64, WIDTH // 2)
                value_later = warpgroup_mma(operand, do_tile, value_sum, is_async=True)
                query_sum = warpgroup_mma_wait(1, deps=[query_later])
                if target >= 0:
                    add(dq, target * 2, query_sum, WIDTH // 2)
                target = base + index
                value_sum = warpgroup_mma_wait(0, deps=[value_later])
                consumer_release(do_empty.index(stage))
                step += 1
                left -= 1
            base += query_tiles
        last = (step + 1) & 1
        mbarrier.wait(ds_full.index(last), ((step - 1) >> 1) & 1)
        query_later = multiply_queries(ds_tiles.index(last), k_tile, no_queries, 0, 64, WIDTH // 2)
        item = item_at(orders, turn + 1)
        v_tile.store(value_sum.to(dtype))  # where there is a last dS, the values have been read for the last time
        query_sum = warpgroup_mma_wait(0, deps=[query_later])
        mbarrier.arrive(k_read.index(0), count=1)
        fence_async_shared()
        mbarrier.arrive(kv_done.index(0), count=1)
        if target >= 0:
            add(dq, target * 2, query_sum, WIDTH // 2)
        turn += 1


@gluon.jit
def _keys(dq, buffers, barriers, orders, shape, tables, scale, STAGES: gl.constexpr,
          WIDTH: gl.constexpr, VALUES: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """The keys' warpgroup: dS, dK, and the right half of dQ."""
    TURNED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])  # [64 keys, 64 queries]
    KEYS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    QUERIES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH // 2, 16])
    q_tiles, do_tiles, k_boxes, v_boxes, _, delta_tiles, p_tiles, ds_tiles = buffers
    kv_full, kv_done, q_full, q_empty, do_full, do_empty, p_full, ds_full, k_read = barriers
    group, query_tiles, heads = shape
    runs, _, _, _, _ = tables
    dtype: gl.constexpr = q_tiles.dtype
    k_tile = k_boxes.index(0).reshape([64, WIDTH])
    v_tile = v_boxes.index(0).reshape([64, VALUES])
    nothing = gl.zeros([64, 64], gl.float32, TURNED)
    no_queries = gl.zeros([64, WIDTH // 2], gl.float32, QUERIES)
    flat = _flat(nothing)
    if PDL:
        gdc_wait()  # what is added to must have been cleared
    step = 0
    turn = 0
    item = item_at(orders, 0)
    while item[0] >= 0:
        _, b, pair = item
        key_sum = gl.zeros([64, WIDTH], gl.float32, KEYS)
        base = (b * heads + pair * group) * query_tiles  # the head's first tile of queries
        mbarrier.wait(kv_full.index(0), turn & 1)
        for member in range(group):
            left, run, index, end, masked = walk_of(item, member, group, tables)
            while left > 0:
                stage = step % STAGES
                phase = (step // STAGES) & 1
                side = step & 1
                run, index, end, masked = further(run, index, end, masked, runs)
                mbarrier.wait(do_full.index(stage), phase)
                q_tile = q_tiles.index(stage).reshape([64, WIDTH])
                do_tile = do_tiles.index(stage).reshape([64, VALUES])
                dp_later = warpgroup_mma(v_tile, do_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
                delta = delta_tiles.index(stage).load(gl.SliceLayout(0, TURNED))[None, :]  # [1, 64]
                dp = warpgroup_mma_wait(0, deps=[dp_later])
                mbarrier.wait(p_full.index(0), step & 1)
                p = _unflat(p_tiles.index(0).load(flat.type.layout), TURNED)
                ds = (p * (dp + delta)).to(dtype)
                operand = gl.convert_layout(ds, gl.DotOperandLayout(0, KEYS, 2))
                ds_tiles.index(side).store(ds)
                fence_async_shared()
                mbarrier.arrive(ds_full.index(side), count=1)
                consumer_release(do_empty.index(stage))
                mbarrier.wait(q_full.index(stage), phase)
                mbarrier.wait(ds_full.index(side), (step >> 1) & 1)
                query_later = multiply_queries(ds_tiles.index(side), k_tile, no_queries, 1, 64, WIDTH // 2)
                key_later = warpgroup_mma(operand, q_tile, key_sum, is_async=True)
                query_sum = warpgroup_mma_wait(1, deps=[query_later])
                add(dq, (base + index) * 2 + 1, query_sum, WIDTH // 2)
                key_sum = warpgroup_mma_wait(0, deps=[key_later])
                consumer_release(q_empty.index(stage))
                step += 1
                left -= 1
            base += query_tiles
        item = item_at(orders, turn + 1)
        mbarrier.wait(k_read.index(0), turn & 1)  # the other has read K for the last time
        k_tile.store((key_sum * scale).to(dtype))
        fence_async_shared()
        mbarrier.arrive(kv_done.index(0), count=1)
        turn += 1


# Whether these are multiples of 16 makes no difference here, and would only compile the kernel again.
_SIZES = (
    "most_runs", "most_loads", "by_batch", "by_head", "most_items", "lines", "pairs", "query_tiles", "queries", "keys",
)  # fmt: skip


@gluon.jit(do_not_specialize_on_alignment=_SIZES)
def attention_backward_wide(
    dq, q, do, k, v, stats, dk, dv, mask_tables, runs, plans, loads, counts, orders, most_runs, most_loads,
    by_batch, by_head, most_items, lines, pairs, group, query_tiles, queries, keys, factor, scale, softcap,
    MASK: gl.constexpr, TRAITS: gl.constexpr, CAP: gl.constexpr, STAGES: gl.constexpr, WIDTH: gl.constexpr,
    VALUES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    k_boxes = gl.allocate_shared_memory(k.dtype, [1, 1, 64, 1, WIDTH], k.layout)
    v_boxes = gl.allocate_shared_memory(v.dtype, [1, 1, 64, 1, VALUES], v.layout)
    q_tiles = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 64, 1, WIDTH], q.layout)
    do_tiles = gl.allocate_shared_memory(do.dtype, [STAGES, 1, 64, 1, VALUES], do.layout)
    norm_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, 64], stats.layout)
    delta_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, 64], stats.layout)
    p_tiles = gl.allocate_shared_memory(gl.float32, [1, 64 * 64], stats.layout)
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], q.dtype)
    ds_tiles = gl.allocate_shared_memory(q.dtype, [2, 64, 64], DS)
    kv_full = new_barriers(1, 1)
    kv_done = new_barriers(1, 2)
    q_full = new_barriers(STAGES, 1)
    q_empty = new_barriers(STAGES, 128)
    do_full = new_barriers(STAGES, 1)
    do_empty = new_barriers(STAGES, 256)
    p_full = new_barriers(1, 1)
    ds_full = new_barriers(2, 1)
    k_read = new_barriers(1, 1)
    if PDL:
        pdl_enter()
    synchronize()  # else the compiler does so in the loading warp's loops, since these are what it waits for
    heads = pairs * group
    inputs = (q, do, k, v, stats)
    outputs = (dq, dk, dv)
    sources = (q_tiles, do_tiles, k_boxes, v_boxes, norm_tiles, delta_tiles)
    buffers = (q_tiles, do_tiles, k_boxes, v_boxes, norm_tiles, delta_tiles, p_tiles, ds_tiles)
    loading = (kv_full, kv_done, q_full, q_empty, do_full, do_empty)
    barriers = (kv_full, kv_done, q_full, q_empty, do_full, do_empty, p_full, ds_full, k_read)
    own_orders = orders + gl.program_id(0) * most_items * 3
    loaded = (group, query_tiles * 64, heads, lines * group * query_tiles * 64)
    walked = (group, query_tiles, heads)
    sources_of = (loads, counts, most_loads, by_batch, by_head)
    tables = (runs, plans, most_runs, by_batch, by_head)
    numbers = (queries, keys, factor, scale, softcap)
    gl.warp_specialize([
        (load_steps, (inputs, outputs, sources, loading, own_orders, loaded, sources_of, 64, STAGES, False, 1,
                      PDL)),
        (_values, (dq, buffers, barriers, own_orders, walked, tables, numbers, mask_tables,
                   MASK, TRAITS, CAP, STAGES, WIDTH, VALUES, PDL)),
        (_keys, (dq, buffers, barriers, own_orders, walked, tables, scale, STAGES, WIDTH, VALUES, PDL)),
    ], [4, 4], [240, 240])  # fmt: skip
