"""Attention forward on Hopper: one warp loads tiles, warpgroups multiply them, and neither waits for the other.

A program stays on its multiprocessor and takes one item after another, in an order made on the host: 64 rows of queries
for each consumer warpgroup, against the key tiles that the mask leaves. The loading warp runs ahead, into the next item
as well. Within a warpgroup, S = Q K^T of the next tile is issued before O += P V of this one, and with FLAT the next
tile may be the next item's: the tensor cores work while exponentials are computed and while an item ends.

Rows are queries of one head, or, with PACK > 1, of PACK heads that share their keys: row r is query r // PACK of head
r % PACK. What a row sees must then not depend on its head.
"""

from flashkernel.blocks.softmax_triton import LN2, LOG2E, tanh
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
from flashkernel.ops.attention.hopper.schedule import ahead, item, place_of, plan, skip


@gluon.jit
def _loads(number, shape, tables, PACK: gl.constexpr):
    """(runs of key tiles to load for an item, where they are, the first one and its end)."""
    _, tiles, heads, _, _ = shape
    runs, counts, most_runs, by_batch, by_head = tables
    tile, b, h = item(number, tiles, heads, PACK)
    place = b.to(gl.int64) * by_batch + h * by_head + tile
    first = runs + place * most_runs * 3
    return gl.load(counts + place), first, gl.load(first), gl.load(first + 1)


@gluon.jit
def _load(inputs, buffers, barriers, shape, tables, GROUPS: gl.constexpr, STAGES: gl.constexpr, COLUMNS: gl.constexpr,
          PACK: gl.constexpr, FLAT: gl.constexpr):  # fmt: skip
    """The loading warp. What it reads of an item is asked for one item ahead."""
    q, k, v = inputs
    q_tiles, k_tiles, v_tiles, _ = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    orders, tiles, heads, group, _ = shape
    PART: gl.constexpr = 64 // PACK  # queries of a warpgroup
    HELD: gl.constexpr = 2 if FLAT else 1  # queries of so many items
    loaded = 0
    step = 0
    number = gl.load(orders)
    count, place, begin, end = _loads(number, shape, tables, PACK)
    while number >= 0:
        tile, b, h = item(number, tiles, heads, PACK)
        number = gl.load(orders + step + 1)
        count_later, place_later, begin_later, end_later = _loads(number, shape, tables, PACK)
        for w in gl.static_range(GROUPS):
            held = step % HELD * GROUPS + w
            mbarrier.wait(q_empty.index(held), ((step // HELD) & 1) ^ 1)
            mbarrier.expect(q_full.index(held), q.block_type.nbytes)
            load_tile(q, [b, (tile * GROUPS + w) * PART, h, 0], q_full.index(held), q_tiles.index(held))
        pair = h // group
        for run in range(count):
            if run > 0:
                begin = gl.load(place + run * 3)
                end = gl.load(place + run * 3 + 1)
            for index in range(begin, end):
                stage = loaded % STAGES
                phase = (loaded // STAGES) & 1
                mbarrier.wait(k_empty.index(stage), phase ^ 1)
                mbarrier.expect(k_full.index(stage), k.block_type.nbytes)
                load_tile(k, [b, index * COLUMNS, pair, 0], k_full.index(stage), k_tiles.index(stage))
                mbarrier.wait(v_empty.index(stage), phase ^ 1)
                mbarrier.expect(v_full.index(stage), v.block_type.nbytes)
                load_tile(v, [b, index * COLUMNS, pair, 0], v_full.index(stage), v_tiles.index(stage))
                loaded += 1
        count, place, begin, end = count_later, place_later, begin_later, end_later
        step += 1


@gluon.jit
def _scores(s, index, masked, number, shape, numbers, mask_tables, w: gl.constexpr, MASK: gl.constexpr,
            CAP: gl.constexpr, EARLY: gl.constexpr, GROUPS: gl.constexpr, COLUMNS: gl.constexpr, PACK: gl.constexpr,
            SCORES: gl.constexpr):  # fmt: skip
    """[64, COLUMNS] products as they go into the softmax; with EARLY they leave multiplied, in powers of two."""
    queries, keys, scale, softcap = numbers
    if CAP:
        s = (softcap * LOG2E) * tanh(s * (scale / softcap))
    elif EARLY:
        s = s * (scale * LOG2E)
    if masked != 0:
        key = index * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, SCORES))[None, :]  # [1, COLUMNS]
        seen = key < keys
        if MASK is not None:
            _, tiles, heads, _, _ = shape
            tile, b, h = item(number, tiles, heads, PACK)
            query = (tile * GROUPS + w) * (64 // PACK) + gl.arange(0, 64, gl.SliceLayout(1, SCORES)) // PACK  # [64]
            seen = seen & MASK(b, h, query[:, None], key, queries, keys, mask_tables)
        s = gl.where(seen, s, float("-inf"))
    return s


@gluon.jit
def _softmax(s, top, factor, COLUMNS: gl.constexpr, SCORES: gl.constexpr):
    """(weights [64, COLUMNS], what older weights are multiplied by [64], the new top [64], in powers of two)."""
    # Eight columns at a time: one long chain of comparisons would be all latency.
    largest = gl.convert_layout(gl.max(gl.max(s.reshape([64, COLUMNS // 8, 8]), 1), 1), gl.SliceLayout(1, SCORES))
    higher = gl.maximum(top, largest * factor)
    anchor = gl.where(higher == float("-inf"), 0.0, higher)
    return gl.exp2(s * factor - anchor[:, None]), gl.exp2(top - anchor), higher


@gluon.jit
def _sums(p, COLUMNS: gl.constexpr):
    """[64, 8]: sums of weights that need no other thread; a row's total is their sum."""
    return gl.sum(p.reshape([64, COLUMNS // 8, 8]), 1)


@gluon.jit
def _share(top, parts, number, lse, shape, sinks, w: gl.constexpr, HAS_SINKS: gl.constexpr, GROUPS: gl.constexpr,
           PACK: gl.constexpr, SCORES: gl.constexpr):  # fmt: skip
    """[64]: what an item's output is multiplied by in the end; its logarithms of sums are stored."""
    _, tiles, heads, _, queries = shape
    tile, b, h = item(number, tiles, heads, PACK)
    row = gl.arange(0, 64, gl.SliceLayout(1, SCORES))
    query = (tile * GROUPS + w) * (64 // PACK) + row // PACK  # [64]
    head = h + row % PACK  # [64]
    total = gl.convert_layout(gl.sum(parts, 1), gl.SliceLayout(1, SCORES))
    if HAS_SINKS:  # one more column, in the denominator only
        sink = gl.load(sinks + head).to(gl.float32) * LOG2E
        higher = gl.maximum(top, sink)
        rescale = gl.exp2(top - higher)
        total = total * rescale + gl.exp2(sink - higher)
        top = higher
        share = gl.where(total == 0.0, 0.0, rescale / total)
    else:
        share = gl.where(total == 0.0, 0.0, 1.0 / total)
    log_sum = gl.where(total == 0.0, float("-inf"), (top + gl.log2(total)) * LN2)
    gl.store(lse + (b.to(gl.int64) * heads + head) * queries + query, log_sum, mask=query < queries)
    return share


@gluon.jit
def _store(output, number, o, o_tiles, shape, w: gl.constexpr, GROUPS: gl.constexpr, VALUES: gl.constexpr,
           PACK: gl.constexpr, SHARE: gl.constexpr):  # fmt: skip
    """Send 64 rows of an item's output off."""
    _, tiles, heads, _, _ = shape
    tile, b, h = item(number, tiles, heads, PACK)
    if not SHARE:
        tma.store_wait(0)  # the last item's output has left the buffer
    o_tiles.index(w).reshape([64, VALUES]).store(output.to(o.dtype))
    fence_async_shared()
    store_tile(o, [b, (tile * GROUPS + w) * (64 // PACK), h, 0], o_tiles.index(w))


@gluon.jit
def _walk(outputs, buffers, barriers, shape, tables, numbers, factor, sinks, mask_tables, step, used, state,
          w: gl.constexpr, MASK: gl.constexpr, CAP: gl.constexpr, EARLY: gl.constexpr, HAS_SINKS: gl.constexpr,
          GROUPS: gl.constexpr, STAGES: gl.constexpr, COLUMNS: gl.constexpr, WIDTH: gl.constexpr, VALUES: gl.constexpr,
          PACK: gl.constexpr, SHARE: gl.constexpr, FLAT: gl.constexpr, SCORES: gl.constexpr,
          OUTPUT: gl.constexpr):  # fmt: skip
    """Walk over the key tiles of an item and, with FLAT, of the items after it, as long as the next one's first tile
    is near; at least one tile. All but the last item are finished.

    A tile's S = Q K^T is issued before O += P V of the tile before it, whichever items the two belong to: the tensor
    cores work while the exponentials are computed, and while the tables are asked what comes next. Gives (output, top,
    sums) of the last item, its step and the tiles used.
    """
    q_tiles, k_tiles, v_tiles, o_tiles = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    o, lse = outputs
    orders, _, _, _, _ = shape
    HELD: gl.constexpr = 2 if FLAT else 1
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, OUTPUT, 2)
    dtype: gl.constexpr = k_tiles.dtype
    nothing = gl.zeros([64, COLUMNS], gl.float32, SCORES)
    lowest = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    stage = used % STAGES
    mbarrier.wait(k_full.index(stage), (used // STAGES) & 1)
    query_tile = q_tiles.index(step % HELD * GROUPS + w).reshape([64, WIDTH])
    keys_tile = k_tiles.index(stage).reshape([COLUMNS, WIDTH])
    s_later = warpgroup_mma(query_tile, keys_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
    number, left = state[0], state[1]
    index, masked = state[3], state[5]
    ended = left == 0
    state, hop = ahead(step, state, shape, tables, w, GROUPS, STAGES, PACK, FLAT)
    s = warpgroup_mma_wait(0, deps=[s_later])
    mbarrier.arrive(k_empty.index(stage), count=1)
    s = _scores(s, index, masked, number, shape, numbers, mask_tables, w, MASK, CAP, EARLY, GROUPS, COLUMNS, PACK,
                SCORES)  # fmt: skip
    p, rescale, top = _softmax(s, lowest, factor, COLUMNS, SCORES)
    parts = _sums(p, COLUMNS)
    PARTS: gl.constexpr = gl.SliceLayout(1, parts.type.layout)
    weight = gl.convert_layout(p.to(dtype), OPERAND)
    output = gl.zeros([64, VALUES], gl.float32, OUTPUT)
    more = (hop < STAGES - 1) | (not ended)
    mbarrier.wait(k_full.index((used + 1) % STAGES), ((used + 1) // STAGES) & 1, pred=more)
    while more:
        v_stage = used % STAGES
        v_phase = (used // STAGES) & 1
        used += 1
        begins = ended
        if FLAT and begins:  # an item
            mbarrier.arrive(q_empty.index(step % 2 * GROUPS + w), count=1)
            if hop > 0:
                used = skip((k_full, k_empty, v_full, v_empty), used, hop, STAGES)
                mbarrier.wait(k_full.index(used % STAGES), (used // STAGES) & 1)
            step += 1
            mbarrier.wait(q_full.index(step % 2 * GROUPS + w), (step // 2) & 1)
        stage = used % STAGES
        query_tile = q_tiles.index(step % HELD * GROUPS + w).reshape([64, WIDTH])
        keys_tile = k_tiles.index(stage).reshape([COLUMNS, WIDTH])
        s_later = warpgroup_mma(query_tile, keys_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(v_stage), v_phase)
        values_tile = v_tiles.index(v_stage).reshape([COLUMNS, VALUES])
        output_later = warpgroup_mma(weight, values_tile, output, is_async=True)
        number, left = state[0], state[1]
        index, masked = state[3], state[5]
        if FLAT and begins:  # the item before it has seen all its keys
            done = gl.load(orders + (step - 1))
            share = _share(top, parts, done, lse, shape, sinks, w, HAS_SINKS, GROUPS, PACK, SCORES)
            top = lowest
            parts = gl.zeros_like(parts)
        else:
            done = number
            share = lowest
        ended = left == 0
        state, hop = ahead(step, state, shape, tables, w, GROUPS, STAGES, PACK, FLAT)
        s = warpgroup_mma_wait(1, deps=[s_later])
        mbarrier.arrive(k_empty.index(stage), count=1)
        s = _scores(s, index, masked, number, shape, numbers, mask_tables, w, MASK, CAP, EARLY, GROUPS, COLUMNS, PACK,
                    SCORES)  # fmt: skip
        p, rescale, top = _softmax(s, top, factor, COLUMNS, SCORES)
        parts = parts * gl.convert_layout(rescale, PARTS)[:, None] + _sums(p, COLUMNS)
        if FLAT:
            rescale = gl.where(begins, share, rescale)
        more = (hop < STAGES - 1) | (not ended)
        # The next keys are awaited here and not when they are needed: ptxas moves the wait for the product up to the
        # last branch, and without this one the product would be over before the exponentials begin.
        mbarrier.wait(k_full.index((used + 1) % STAGES), ((used + 1) // STAGES) & 1, pred=more)
        output = warpgroup_mma_wait(0, deps=[output_later])
        mbarrier.arrive(v_empty.index(v_stage), count=1)
        output = output * gl.convert_layout(rescale, gl.SliceLayout(1, OUTPUT))[:, None]
        if FLAT and begins:
            _store(output, done, o, o_tiles, shape, w, GROUPS, VALUES, PACK, SHARE)
            output = gl.zeros([64, VALUES], gl.float32, OUTPUT)
        weight = gl.convert_layout(p.to(dtype), OPERAND)
    if not SHARE:
        mbarrier.arrive(q_empty.index(step % HELD * GROUPS + w), count=1)
    stage = used % STAGES
    mbarrier.wait(v_full.index(stage), (used // STAGES) & 1)
    output_later = warpgroup_mma(weight, v_tiles.index(stage).reshape([COLUMNS, VALUES]), output, is_async=True)
    output = warpgroup_mma_wait(0, deps=[output_later])
    mbarrier.arrive(v_empty.index(stage), count=1)
    return output, top, parts, step, used + 1


@gluon.jit
def _consume(outputs, buffers, barriers, shape, tables, numbers, factor, sinks, mask_tables, w: gl.constexpr,
             MASK: gl.constexpr, CAP: gl.constexpr, EARLY: gl.constexpr, HAS_SINKS: gl.constexpr, GROUPS: gl.constexpr,
             STAGES: gl.constexpr, COLUMNS: gl.constexpr, WIDTH: gl.constexpr, VALUES: gl.constexpr,
             PACK: gl.constexpr, SHARE: gl.constexpr, FLAT: gl.constexpr):  # fmt: skip
    """Warpgroup `w`: 64 rows of every item."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, VALUES, 16])
    HELD: gl.constexpr = 2 if FLAT else 1
    o, lse = outputs
    _, _, _, o_tiles = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    orders, _, _, _, _ = shape
    _, plans, _, _, _ = tables
    pipeline = (k_full, k_empty, v_full, v_empty)
    used = 0  # tiles of this program so far: says the stage and the phase
    step = 0
    number = gl.load(orders)
    while number >= 0:
        place = place_of(number, shape, tables, w, GROUPS, PACK)
        own = gl.load(plans + place * 3 + 1)
        used = skip(pipeline, used, gl.load(plans + place * 3), STAGES)
        held = step % HELD * GROUPS + w
        mbarrier.wait(q_full.index(held), (step // HELD) & 1)
        if own > 0:
            left, run, index, end, masked = plan(place, tables)
            output, top, parts, step, used = _walk(
                outputs, buffers, barriers, shape, tables, numbers, factor, sinks, mask_tables, step, used,
                (number, left - 1, run, index, end, masked), w, MASK, CAP, EARLY, HAS_SINKS, GROUPS, STAGES, COLUMNS,
                WIDTH, VALUES, PACK, SHARE, FLAT, SCORES, OUTPUT,
            )  # fmt: skip
            number = gl.load(orders + step)
            trail = gl.load(plans + place_of(number, shape, tables, w, GROUPS, PACK) * 3 + 2)
            used = skip(pipeline, used, trail, STAGES)
        else:
            if not SHARE:
                mbarrier.arrive(q_empty.index(held), count=1)
            output = gl.zeros([64, VALUES], gl.float32, OUTPUT)
            top = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
            parts = _sums(gl.zeros([64, COLUMNS], gl.float32, SCORES), COLUMNS)
        share = _share(top, parts, number, lse, shape, sinks, w, HAS_SINKS, GROUPS, PACK, SCORES)
        output = output * gl.convert_layout(share, gl.SliceLayout(1, OUTPUT))[:, None]
        _store(output, number, o, o_tiles, shape, w, GROUPS, VALUES, PACK, SHARE)
        if SHARE:  # only now may the next queries come
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index(w), count=1)
        step += 1
        number = gl.load(orders + step)
    tma.store_wait(0)


# Whether these are multiples of 16 makes no difference here, and would only compile the kernel again.
_SIZES = (
    "most_runs", "most_loads", "by_batch", "by_head", "most_items", "tiles", "heads", "queries", "keys",
)  # fmt: skip


@gluon.jit(do_not_specialize_on_alignment=_SIZES)
def attention_forward(
    lse, q, k, v, o, sinks, mask_tables, runs, plans, loads, counts, orders, most_runs, most_loads, by_batch, by_head,
    most_items, tiles, heads, group, queries, keys, factor, scale, softcap,
    MASK: gl.constexpr, CAP: gl.constexpr, EARLY: gl.constexpr, HAS_SINKS: gl.constexpr, GROUPS: gl.constexpr,
    STAGES: gl.constexpr, COLUMNS: gl.constexpr, WIDTH: gl.constexpr, VALUES: gl.constexpr, PACK: gl.constexpr,
    SHARE: gl.constexpr, FLAT: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    PART: gl.constexpr = 64 // PACK
    HELD: gl.constexpr = 2 * GROUPS if FLAT else GROUPS
    q_tiles = gl.allocate_shared_memory(q.dtype, [HELD, 1, PART, PACK, WIDTH], q.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [STAGES, 1, COLUMNS, 1, WIDTH], k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [STAGES, 1, COLUMNS, 1, VALUES], v.layout)
    if SHARE:
        o_tiles = q_tiles
    else:
        o_tiles = gl.allocate_shared_memory(o.dtype, [GROUPS, 1, PART, PACK, VALUES], o.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [HELD, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [HELD, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for held in gl.static_range(HELD):
        mbarrier.init(q_full.index(held), count=1)
        mbarrier.init(q_empty.index(held), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=GROUPS)
        mbarrier.init(v_empty.index(stage), count=GROUPS)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    inputs, outputs = (q, k, v), (o, lse)
    buffers = (q_tiles, k_tiles, v_tiles, o_tiles)
    shape = (orders + gl.program_id(0) * most_items, tiles, heads, group, queries)
    tables = (runs, plans, most_runs, by_batch, by_head)
    sources = (loads, counts, most_loads, by_batch, by_head)
    numbers = (queries, keys, scale, softcap)
    if GROUPS == 2:
        gl.warp_specialize([
            (_consume, (outputs, buffers, barriers, shape, tables, numbers, factor, sinks, mask_tables, 0,
                        MASK, CAP, EARLY, HAS_SINKS, GROUPS, STAGES, COLUMNS, WIDTH, VALUES, PACK, SHARE, FLAT)),
            (_consume, (outputs, buffers, barriers, shape, tables, numbers, factor, sinks, mask_tables, 1,
                        MASK, CAP, EARLY, HAS_SINKS, GROUPS, STAGES, COLUMNS, WIDTH, VALUES, PACK, SHARE, FLAT)),
            (_load, (inputs, buffers, barriers, shape, sources, GROUPS, STAGES, COLUMNS, PACK, FLAT)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (outputs, buffers, barriers, shape, tables, numbers, factor, sinks, mask_tables, 0,
                        MASK, CAP, EARLY, HAS_SINKS, GROUPS, STAGES, COLUMNS, WIDTH, VALUES, PACK, SHARE, FLAT)),
            (_consume, (outputs, buffers, barriers, shape, tables, numbers, factor, sinks, mask_tables, 1,
                        MASK, CAP, EARLY, HAS_SINKS, GROUPS, STAGES, COLUMNS, WIDTH, VALUES, PACK, SHARE, FLAT)),
            (_consume, (outputs, buffers, barriers, shape, tables, numbers, factor, sinks, mask_tables, 2,
                        MASK, CAP, EARLY, HAS_SINKS, GROUPS, STAGES, COLUMNS, WIDTH, VALUES, PACK, SHARE, FLAT)),
            (_load, (inputs, buffers, barriers, shape, sources, GROUPS, STAGES, COLUMNS, PACK, FLAT)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip
