"""Device functions that the Hopper backward kernels share: the loading warp, walks, masks, and dQ = dS K.

The loading warp runs ahead into the next item, and also stores: dK and dV are left in the buffers of K and V, and it
sends them off before it loads what comes there next. With two of these buffers (HELD) the next item's are there before
this one has ended.
"""

from triton.language.extra.cuda import gdc_wait

from flashkernel.core.gluon import gl, gluon, load_tile, mbarrier, store_tile, tma, warpgroup_mma
from flashkernel.ops.attention.hopper.schedule import item_at


@gluon.jit
def _fetch(inputs, buffers, kv_full, orders, turn, HELD: gl.constexpr):
    """Load keys and values of an item, if there is one."""
    _, _, k, v, _ = inputs
    _, _, k_boxes, v_boxes, _, _ = buffers
    tile, b, pair = item_at(orders, turn)
    if tile >= 0:
        held = turn % HELD
        bar = kv_full.index(held)
        mbarrier.expect(bar, k.block_type.nbytes + v.block_type.nbytes)
        load_tile(k, [b, tile * k.block_shape[1], pair, 0], bar, k_boxes.index(held))
        load_tile(v, [b, tile * v.block_shape[1], pair, 0], bar, v_boxes.index(held))


@gluon.jit
def _hand_over(inputs, outputs, buffers, kv_full, kv_done, orders, turn, HELD: gl.constexpr):
    """Store an item's dK and dV from where its keys and values were, and load there those of the item HELD later."""
    _, dk, dv = outputs
    _, _, k_boxes, v_boxes, _, _ = buffers
    tile, b, pair = item_at(orders, turn)
    held = turn % HELD
    mbarrier.wait(kv_done.index(held), (turn // HELD) & 1)
    store_tile(dv, [b, tile * dv.block_shape[1], pair, 0], v_boxes.index(held))
    store_tile(dk, [b, tile * dk.block_shape[1], pair, 0], k_boxes.index(held))
    tma.store_wait(0)
    _fetch(inputs, buffers, kv_full, orders, turn + HELD, HELD)


@gluon.jit
def load_steps(inputs, outputs, buffers, barriers, orders, shape, tables, ROWS: gl.constexpr, STAGES: gl.constexpr,
          JOINT: gl.constexpr, HELD: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """The loading warp. With JOINT, all that a step reads comes and goes at once.

    An item is handed over once the next one's first STAGES steps are on their way: until the item has ended there is
    no room for more of them. The end of the list counts as one more item, without steps.
    """
    q, do, _, _, stats = inputs
    q_tiles, do_tiles, _, _, norm_tiles, delta_tiles = buffers
    kv_full, kv_done, q_full, q_empty, do_full, do_empty = barriers
    group, padded, heads, rows = shape
    runs, counts, most_runs, by_batch, by_head = tables
    if PDL:
        gdc_wait()
    for turn in gl.static_range(HELD):
        _fetch(inputs, buffers, kv_full, orders, turn, HELD)
    loaded = 0
    turn = 0
    more = True
    while more:
        tile, b, pair = item_at(orders, turn)
        more = tile >= 0
        behind = turn > 0  # the item before is still to be handed over
        room = loaded + STAGES
        for member in range(gl.where(more, group, 0)):
            h = pair * group + member
            row = b.to(gl.int64) * by_batch + h * by_head + tile
            stat = (b * heads + h) * padded
            for run in range(gl.load(counts + row)):
                begin = gl.load(runs + (row * most_runs + run) * 3)
                end = gl.load(runs + (row * most_runs + run) * 3 + 1)
                for index in range(begin, end):
                    if behind & (loaded == room):
                        _hand_over(inputs, outputs, buffers, kv_full, kv_done, orders, turn - 1, HELD)
                        behind = False
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
        if behind:
            _hand_over(inputs, outputs, buffers, kv_full, kv_done, orders, turn - 1, HELD)
        turn += 1


@gluon.jit
def add(dq, place, part, COLUMNS: gl.constexpr):
    """Add [64, COLUMNS] to a buffer, in the order in which the registers hold it: 16 bytes a thread, side by side.

    Row 16 w + 8 i + r, column 8 j + 2 c + e lies at (j, w, r, c, i, e).
    """
    flat = part.reshape([4, 2, 8, COLUMNS // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([64 * COLUMNS])
    at = dq + place.to(gl.int64) * (64 * COLUMNS) + gl.arange(0, 64 * COLUMNS, flat.type.layout)
    gl.atomic_add(at, flat, sem="relaxed")


@gluon.jit
def multiply_queries(ds_tile, k_tile, nothing, w: gl.constexpr, ROWS: gl.constexpr, PART: gl.constexpr):
    """Issue this warpgroup's half of dS K, [64, PART]: of the rows where a tile has 128, else of the columns."""
    if ROWS == 128:
        left = ds_tile.slice(w * 64, 64, dim=1).permute((1, 0))  # [64, 128]
        product = warpgroup_mma(left, k_tile, nothing, use_acc=False, is_async=True)
    else:
        half = k_tile.slice(w * PART, PART, dim=1)
        product = warpgroup_mma(ds_tile.permute((1, 0)), half, nothing, use_acc=False, is_async=True)
    return product


@gluon.jit
def walk_of(item, member, group, tables):
    """(tiles of queries, place of their first run, the tile before it, its end, whether it is masked) of a head; of the
    first one where there is no item."""
    runs, plans, most_runs, by_batch, by_head = tables
    tile, b, pair = item
    row = b.to(gl.int64) * by_batch + (pair * group + member) * by_head + gl.maximum(tile, 0)
    run = (row * most_runs * 3).to(gl.int32)
    return gl.load(plans + row * 3 + 1), run, gl.load(runs + run) - 1, gl.load(runs + run + 1), gl.load(runs + run + 2)


@gluon.jit
def seen_by(b, h, first_query, first_key, queries, keys, mask_tables, MASK: gl.constexpr, TRAITS: gl.constexpr,
          ROWS: gl.constexpr, TURNED: gl.constexpr):  # fmt: skip
    """[64, ROWS]: which of 64 keys are seen by which queries."""
    RELATIVE: gl.constexpr = TRAITS % 2 == 1  # both are counted from the first query
    BOUNDED: gl.constexpr = TRAITS >= 2  # the mask sees to the last key
    query = gl.arange(0, ROWS, gl.SliceLayout(0, TURNED))[None, :]  # [1, ROWS]
    key = first_key + gl.arange(0, 64, gl.SliceLayout(1, TURNED))[:, None]  # [64, 1]
    seen = key < keys
    if MASK is not None:
        if RELATIVE:
            visible = MASK(b, h, query, key - first_query, queries, keys, mask_tables)
        else:
            visible = MASK(b, h, first_query + query, key, queries, keys, mask_tables)
        if BOUNDED:
            seen = visible
        else:
            seen = seen & visible
    return seen
