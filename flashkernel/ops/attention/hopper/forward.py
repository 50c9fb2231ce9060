"""Attention forward on Hopper: one warp loads tiles, warpgroups multiply them, and neither waits for the other.

A program stays on its multiprocessor and takes one item after another, in an order made on the host: 64 rows of queries
for each consumer warpgroup, against the key tiles that the mask leaves. The loading warp runs ahead, into the next item
as well. Within a warpgroup, S = Q K^T of the next tile is issued before O += P V of this one, and with OVERLAP that of
the next item's first tile before the last product of this one: the tensor cores work while exponentials are computed
and while an item ends.

With FIXED_MAX a work item uses the row max of its first key tile for all its key tiles and never rescales. Items whose
row sums leave [LEAST, MOST] are flagged and computed again with the online softmax (overflow_retry.py).

Rows are queries of one head, or, with PACK > 1, of PACK heads that share their keys: row r is query r // PACK of head
r % PACK. What a row sees must then not depend on its head.
"""

from flashkernel.core.gluon import (
    fence_async_shared,
    gl,
    gluon,
    load_tile,
    mbarrier,
    new_barriers,
    store_tile,
    synchronize,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashkernel.ops.attention.hopper.overflow_retry import any_flagged, clear, next_work_tile, stores_done
from flashkernel.ops.attention.hopper.schedule import (
    after,
    ahead,
    claim_all,
    claim_keys,
    claim_values,
    first_query,
    hop_to,
    item_at,
    place_of,
    plan,
    return_keys,
    return_values,
    skip,
)
from flashkernel.ops.attention.hopper.softmax import (
    first_weights,
    halves,
    joined,
    scores_of,
    share_of,
    softmax,
    sums_of,
    weights_of,
)


@gluon.jit
def _loads(item, tables):
    """(runs of key tiles to load for an item, where they are, the first one and its end)."""
    runs, counts, most_runs, _, _ = tables
    place = place_of(item, tables, 0, 1)
    first = runs + place * most_runs * 3
    return gl.load(counts + place), first, gl.load(first), gl.load(first + 1)


@gluon.jit
def _feed(inputs, buffers, barriers, shape, tables, loaded, turn, GROUPS: gl.constexpr, STAGES: gl.constexpr,
          COLUMNS: gl.constexpr, PACK: gl.constexpr, OVERLAP: gl.constexpr, RETRY: gl.constexpr):  # fmt: skip
    """Load what the items need, all of them or (RETRY) the flagged ones; the tables are asked one item ahead. Gives
    (tiles loaded so far, items loaded so far)."""
    q, k, v = inputs
    q_tiles, k_tiles, v_tiles, _ = buffers
    q_full, q_empty, k_full, v_full, _ = barriers
    orders, retry_flags, _, group, queries = shape
    PART: gl.constexpr = 64 // PACK  # queries of a warpgroup
    HELD: gl.constexpr = 2 if OVERLAP else 1  # queries of so many items
    step, item = next_work_tile(orders, retry_flags, 0, RETRY)
    count, place, begin, end = _loads(item, tables)
    while item[0] >= 0:
        tile, b, h = item
        step, item = next_work_tile(orders, retry_flags, step + 1, RETRY)
        count_later, place_later, begin_later, end_later = _loads(item, tables)
        for w in gl.static_range(GROUPS):
            held = turn % HELD * GROUPS + w
            mbarrier.wait(q_empty.index(held), ((turn // HELD) & 1) ^ 1)
            mbarrier.expect(q_full.index(held), q.block_type.nbytes)
            first = first_query(tile, w, queries, GROUPS, PART)
            load_tile(q, [b, first, h, 0], q_full.index(held), q_tiles.index(held))
        pair = h // group
        for run in range(count):
            if run > 0:
                begin = gl.load(place + run * 3)
                end = gl.load(place + run * 3 + 1)
            for index in range(begin, end):
                stage = loaded % STAGES
                claim_keys(loaded, GROUPS, STAGES)
                mbarrier.expect(k_full.index(stage), k.block_type.nbytes)
                load_tile(k, [b, index * COLUMNS, pair, 0], k_full.index(stage), k_tiles.index(stage))
                claim_values(loaded, GROUPS, STAGES)
                mbarrier.expect(v_full.index(stage), v.block_type.nbytes)
                load_tile(v, [b, index * COLUMNS, pair, 0], v_full.index(stage), v_tiles.index(stage))
                loaded += 1
        count, place, begin, end = count_later, place_later, begin_later, end_later
        turn += 1
    return loaded, turn


@gluon.jit
def _load(inputs, buffers, barriers, shape, tables, GROUPS: gl.constexpr, STAGES: gl.constexpr, COLUMNS: gl.constexpr,
          PACK: gl.constexpr, OVERLAP: gl.constexpr, FIXED_MAX: gl.constexpr):  # fmt: skip
    """The loading warp."""
    nothing = gl.to_tensor(0)
    loaded, turn = _feed(inputs, buffers, barriers, shape, tables, nothing, nothing, GROUPS, STAGES, COLUMNS, PACK,
                         OVERLAP, False)  # fmt: skip
    if FIXED_MAX:
        flagged = any_flagged(shape[1], barriers[4])
        if flagged:
            loaded, turn = _feed(inputs, buffers, barriers, shape, tables, loaded, turn, GROUPS, STAGES, COLUMNS, PACK,
                                 OVERLAP, True)  # fmt: skip
    claim_all(loaded, GROUPS, STAGES)


@gluon.jit
def _store(output, item, o, o_tiles, shape, w: gl.constexpr, GROUPS: gl.constexpr, VALUES: gl.constexpr,
           PACK: gl.constexpr, SHARE: gl.constexpr):  # fmt: skip
    """Send 64 rows of an item's output off."""
    tile, b, h = item
    _, _, _, _, queries = shape
    if not SHARE:
        tma.store_wait(0)  # the last item's output has left the buffer
    o_tiles.index(w).reshape([64, VALUES]).store(output.to(o.dtype))
    fence_async_shared()
    store_tile(o, [b, first_query(tile, w, queries, GROUPS, 64 // PACK), h, 0], o_tiles.index(w))


@gluon.jit
def _walk(buffers, barriers, tables, numbers, factor, mask_tables, item, query_tile, place, state, weight, top,
          parts, w: gl.constexpr, MASK: gl.constexpr, TRAITS: gl.constexpr, CAP: gl.constexpr, EARLY: gl.constexpr,
          GROUPS: gl.constexpr, STAGES: gl.constexpr, COLUMNS: gl.constexpr, WIDTH: gl.constexpr,
          VALUES: gl.constexpr, PACK: gl.constexpr, FIXED_MAX: gl.constexpr, SCORES: gl.constexpr,
          OUTPUT: gl.constexpr):  # fmt: skip
    """Walk over the key tiles of an item, from the weights of its first tile to those of its last, whose values are
    still to be added. The second tile's keys must have been awaited.

    A tile's S = Q K^T is issued before O += P V of the tile before it: the tensor cores work while the exponentials are
    computed, and while the tables are asked what comes next. With LATE, the last quarter of the weights is computed
    after that product: the others are packed meanwhile. `place` is that of the first tile in the pipeline. Gives
    (output, weights, top, sums, place of the last tile).
    """
    _, k_tiles, v_tiles, _ = buffers
    _, _, k_full, v_full, _ = barriers
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, OUTPUT, 2)
    LAYOUT: gl.constexpr = parts.type.layout
    PARTS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    LATE: gl.constexpr = GROUPS == 2  # with more warpgroups there is always another one to compute
    dtype: gl.constexpr = k_tiles.dtype
    nothing = gl.zeros([64, COLUMNS], gl.float32, SCORES)
    output = gl.zeros([64, VALUES], gl.float32, OUTPUT)
    more = state[0] >= 0
    following = after(place, STAGES)
    while more:
        v_stage, v_phase = place
        place = following
        stage = place[0]
        following = after(place, STAGES)
        keys_tile = k_tiles.index(stage).reshape([COLUMNS, WIDTH])
        s_later = warpgroup_mma(query_tile, keys_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(v_stage), v_phase)
        values_tile = v_tiles.index(v_stage).reshape([COLUMNS, VALUES])
        output_later = warpgroup_mma(weight, values_tile, output, is_async=True)
        index, masked = state[2], state[4]
        state = ahead(state, tables)
        s = warpgroup_mma_wait(1, deps=[s_later])
        return_keys(stage, GROUPS, STAGES)
        s = scores_of(s, index, masked, item, numbers, mask_tables, w, MASK, TRAITS, CAP, EARLY, GROUPS, COLUMNS, PACK,
                      SCORES)  # fmt: skip
        if not FIXED_MAX:
            p, rescale, top = softmax(s, top, factor, COLUMNS, SCORES)
            parts = parts * gl.convert_layout(rescale, PARTS)[:, None] + sums_of(p, COLUMNS)
        elif LATE:
            s_low, s_high = halves(s, COLUMNS)
            s_third, s_last = halves(s_high, COLUMNS // 2)
            p_low, p_third = weights_of(s_low, top, factor), weights_of(s_third, top, factor)
            parts += gl.convert_layout(sums_of(p_low, COLUMNS // 2), LAYOUT)
            parts += gl.convert_layout(sums_of(p_third, COLUMNS // 4), LAYOUT)
        else:
            p = weights_of(s, top, factor)
            parts += sums_of(p, COLUMNS)
        more = state[0] >= 0
        # The next keys are awaited here and not when they are needed: ptxas moves the wait for the product up to the
        # last branch, and without this one the product would be over before the exponentials begin.
        mbarrier.wait(k_full.index(following[0]), following[1], pred=more)
        output = warpgroup_mma_wait(0, deps=[output_later])
        return_values(v_stage, GROUPS, STAGES)
        if not FIXED_MAX:
            output = output * gl.convert_layout(rescale, gl.SliceLayout(1, OUTPUT))[:, None]
        elif LATE:
            p_last = weights_of(s_last, top, factor)
            parts += gl.convert_layout(sums_of(p_last, COLUMNS // 4), LAYOUT)
            p = joined(p_low, joined(p_third, p_last))
        weight = gl.convert_layout(p.to(dtype), OPERAND)
    return output, weight, top, parts, place


@gluon.jit
def _items(outputs, buffers, barriers, shape, tables, numbers, factor, sinks, mask_tables, place, turn,
           w: gl.constexpr, MASK: gl.constexpr, TRAITS: gl.constexpr, CAP: gl.constexpr, EARLY: gl.constexpr,
           HAS_SINKS: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, COLUMNS: gl.constexpr,
           WIDTH: gl.constexpr, VALUES: gl.constexpr, PACK: gl.constexpr, SHARE: gl.constexpr, HELD: gl.constexpr,
           OVERLAP: gl.constexpr, FIXED_MAX: gl.constexpr, RETRY: gl.constexpr):  # fmt: skip
    """Warpgroup `w`: 64 rows of all items, or (RETRY) of the flagged ones. Gives (place in the pipeline, items so far).

    A step of the loop takes an item from the weights of its first tile to its output. With OVERLAP it also finds the
    weights of the next item's first tile, while O += P V of this item's last is computed; where the two lie too far
    apart (`hop_to`), and without OVERLAP, an item begins in its own step.
    """
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, VALUES, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, OUTPUT, 2)
    o, lse = outputs
    q_tiles, k_tiles, v_tiles, o_tiles = buffers
    q_full, q_empty, k_full, v_full, _ = barriers
    orders, retry_flags, _, _, _ = shape
    _, plans, _, _, _ = tables
    pipeline = (k_full, v_full)
    dtype: gl.constexpr = k_tiles.dtype
    nothing = gl.zeros([64, COLUMNS], gl.float32, SCORES)
    lowest = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    weight, top, parts = gl.convert_layout(nothing.to(dtype), OPERAND), lowest, sums_of(nothing, COLUMNS)
    step, item = next_work_tile(orders, retry_flags, 0, RETRY)
    _, state = plan(place_of(item, tables, w, GROUPS), tables)
    item_next = item
    hop = STAGES - 1
    begun = False
    while item[0] >= 0:
        held = turn % HELD * GROUPS + w
        query_tile = q_tiles.index(held).reshape([64, WIDTH])
        mbarrier.wait(q_full.index(held), (turn // HELD) & 1)
        own = gl.to_tensor(1)  # or more, where it has begun
        if not OVERLAP or not begun:
            lead, state = plan(place_of(item, tables, w, GROUPS), tables)
            own = state[0] + 1
            place = skip(pipeline, place, lead, GROUPS, STAGES)
            if own > 0:
                stage, phase = place
                mbarrier.wait(k_full.index(stage), phase)
                keys_tile = k_tiles.index(stage).reshape([COLUMNS, WIDTH])
                s_later = warpgroup_mma(query_tile, keys_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
                if OVERLAP:
                    item_next = item_at(orders, step + 1)
                    hop = hop_to(item, item_next, tables, w, GROUPS, STAGES)
                index, masked = state[2], state[4]
                state = ahead(state, tables)
                s = warpgroup_mma_wait(0, deps=[s_later])
                return_keys(stage, GROUPS, STAGES)
                p, top, parts = first_weights(s, index, masked, item, numbers, factor, mask_tables, w, MASK, TRAITS,
                                              CAP, EARLY, GROUPS, COLUMNS, PACK, FIXED_MAX, SCORES)  # fmt: skip
                weight = gl.convert_layout(p.to(dtype), OPERAND)
                second, second_phase = after(place, STAGES)
                mbarrier.wait(k_full.index(second), second_phase, pred=state[0] >= 0)
            else:
                weight, top, parts = gl.convert_layout(nothing.to(dtype), OPERAND), lowest, sums_of(nothing, COLUMNS)
                hop = gl.to_tensor(STAGES - 1)
                if OVERLAP:
                    item_next = item_at(orders, step + 1)
        output, weight, top, parts, place = _walk(
            buffers, barriers, tables, numbers, factor, mask_tables, item, query_tile, place, state, weight, top,
            parts, w, MASK, TRAITS, CAP, EARLY, GROUPS, STAGES, COLUMNS, WIDTH, VALUES, PACK, FIXED_MAX, SCORES,
            OUTPUT,
        )  # fmt: skip
        if not SHARE:
            mbarrier.arrive(q_empty.index(held), count=1)
        begun = hop < STAGES - 1
        v_stage, v_phase = place
        values_tile = v_tiles.index(v_stage).reshape([COLUMNS, VALUES])
        if OVERLAP and begun:
            place = skip(pipeline, after(place, STAGES), hop, GROUPS, STAGES)
            stage, phase = place
            held = (turn + 1) % HELD * GROUPS + w
            mbarrier.wait(q_full.index(held), ((turn + 1) // HELD) & 1)
            mbarrier.wait(k_full.index(stage), phase)
            query_tile = q_tiles.index(held).reshape([64, WIDTH])
            keys_tile = k_tiles.index(stage).reshape([COLUMNS, WIDTH])
            s_later = warpgroup_mma(query_tile, keys_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(v_stage), v_phase)
            output_later = warpgroup_mma(weight, values_tile, output, is_async=True)
            _, state = plan(place_of(item_next, tables, w, GROUPS), tables)
            share = share_of(top, parts, item, step, own, lse, shape, sinks, w, HAS_SINKS, GROUPS, PACK, FIXED_MAX,
                             SCORES)  # fmt: skip
            index, masked = state[2], state[4]
            state = ahead(state, tables)
            s = warpgroup_mma_wait(1, deps=[s_later])
            return_keys(stage, GROUPS, STAGES)
            following = item_at(orders, step + 2)
            hop = hop_to(item_next, following, tables, w, GROUPS, STAGES)
            p, top, parts = first_weights(s, index, masked, item_next, numbers, factor, mask_tables, w, MASK, TRAITS,
                                          CAP, EARLY, GROUPS, COLUMNS, PACK, FIXED_MAX, SCORES)  # fmt: skip
            # As in `_walk`, a branch that keeps the wait for the product behind the exponentials.
            second, second_phase = after(place, STAGES)
            mbarrier.wait(k_full.index(second), second_phase, pred=state[0] >= 0)
            output = warpgroup_mma_wait(0, deps=[output_later])
            return_values(v_stage, GROUPS, STAGES)
            weight = gl.convert_layout(p.to(dtype), OPERAND)
        else:
            following = item_next
            if own > 0:
                mbarrier.wait(v_full.index(v_stage), v_phase)
                output_later = warpgroup_mma(weight, values_tile, output, is_async=True)
                trail = gl.load(plans + place_of(item, tables, w, GROUPS) * 3 + 2)
                output = warpgroup_mma_wait(0, deps=[output_later])
                return_values(v_stage, GROUPS, STAGES)
                place = skip(pipeline, after(place, STAGES), trail, GROUPS, STAGES)
            share = share_of(top, parts, item, step, own, lse, shape, sinks, w, HAS_SINKS, GROUPS, PACK, FIXED_MAX,
                             SCORES)  # fmt: skip
        output = output * gl.convert_layout(share, gl.SliceLayout(1, OUTPUT))[:, None]
        _store(output, item, o, o_tiles, shape, w, GROUPS, VALUES, PACK, SHARE)
        if SHARE:  # only now may the next queries come
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index(w), count=1)
        turn += 1
        if OVERLAP:
            step += 1
            item, item_next = item_next, following
        else:
            step, item = next_work_tile(orders, retry_flags, step + 1, RETRY)
    return place, turn


@gluon.jit
def _consume(outputs, buffers, barriers, shape, tables, numbers, factor, sinks, mask_tables, w: gl.constexpr,
             MASK: gl.constexpr, TRAITS: gl.constexpr, CAP: gl.constexpr, EARLY: gl.constexpr,
             HAS_SINKS: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, COLUMNS: gl.constexpr,
             WIDTH: gl.constexpr, VALUES: gl.constexpr, PACK: gl.constexpr, SHARE: gl.constexpr,
             OVERLAP: gl.constexpr, FIXED_MAX: gl.constexpr):  # fmt: skip
    """Warpgroup `w`: all items, and then the flagged ones again with the online softmax."""
    HELD: gl.constexpr = 2 if OVERLAP else 1
    nothing = gl.to_tensor(0)
    place, turn = _items(
        outputs, buffers, barriers, shape, tables, numbers, factor, sinks, mask_tables, (nothing, nothing), nothing, w,
        MASK, TRAITS, CAP, EARLY, HAS_SINKS, GROUPS, STAGES, COLUMNS, WIDTH, VALUES, PACK, SHARE, HELD, OVERLAP,
        FIXED_MAX, False,
    )  # fmt: skip
    if FIXED_MAX:
        stores_done(barriers[4])
        flagged = any_flagged(shape[1], barriers[4])
        if flagged:
            _items(
                outputs, buffers, barriers, shape, tables, numbers, factor, sinks, mask_tables, place, turn, w, MASK,
                TRAITS, CAP, EARLY, HAS_SINKS, GROUPS, STAGES, COLUMNS, WIDTH, VALUES, PACK, SHARE, HELD, False, False,
                True,
            )  # fmt: skip
    tma.store_wait(0)


# Whether these are multiples of 16 makes no difference here, and would only compile the kernel again.
_SIZES = (
    "most_runs", "most_loads", "by_batch", "by_head", "most_items", "heads", "queries", "keys",
)  # fmt: skip


@gluon.jit(do_not_specialize_on_alignment=_SIZES)
def attention_forward(
    lse, q, k, v, o, sinks, retry_flags, mask_tables, runs, plans, loads, counts, orders, most_runs, most_loads,
    by_batch, by_head, most_items, heads, group, queries, keys, factor, scale, softcap,
    MASK: gl.constexpr, TRAITS: gl.constexpr, CAP: gl.constexpr, EARLY: gl.constexpr, HAS_SINKS: gl.constexpr,
    GROUPS: gl.constexpr, STAGES: gl.constexpr, COLUMNS: gl.constexpr, WIDTH: gl.constexpr, VALUES: gl.constexpr,
    PACK: gl.constexpr, SHARE: gl.constexpr, OVERLAP: gl.constexpr, FIXED_MAX: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    PART: gl.constexpr = 64 // PACK
    HELD: gl.constexpr = 2 * GROUPS if OVERLAP else GROUPS
    q_tiles = gl.allocate_shared_memory(q.dtype, [HELD, 1, PART, PACK, WIDTH], q.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [STAGES, 1, COLUMNS, 1, WIDTH], k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [STAGES, 1, COLUMNS, 1, VALUES], v.layout)
    if SHARE:
        o_tiles = q_tiles
    else:
        o_tiles = gl.allocate_shared_memory(o.dtype, [GROUPS, 1, PART, PACK, VALUES], o.layout)
    q_full = new_barriers(HELD, 1)
    q_empty = new_barriers(HELD, 1)
    k_full = new_barriers(STAGES, 1)
    v_full = new_barriers(STAGES, 1)
    done = new_barriers(1, GROUPS)
    if FIXED_MAX:
        retry_flags += gl.program_id(0) * most_items
        clear(retry_flags, most_items)
    synchronize()  # else the compiler does so in the first warpgroup's loops, since these are what they wait for
    barriers = (q_full, q_empty, k_full, v_full, done)
    inputs, outputs = (q, k, v), (o, lse)
    buffers = (q_tiles, k_tiles, v_tiles, o_tiles)
    shape = (orders + gl.program_id(0) * most_items * 3, retry_flags, heads, group, queries)
    tables = (runs, plans, most_runs, by_batch, by_head)
    sources = (loads, counts, most_loads, by_batch, by_head)
    numbers = (queries, keys, scale, softcap)
    if GROUPS == 2:
        gl.warp_specialize([
            (_consume, (outputs, buffers, barriers, shape, tables, numbers, factor, sinks, mask_tables, 0,
                        MASK, TRAITS, CAP, EARLY, HAS_SINKS, GROUPS, STAGES, COLUMNS, WIDTH, VALUES, PACK, SHARE,
                        OVERLAP, FIXED_MAX)),
            (_consume, (outputs, buffers, barriers, shape, tables, numbers, factor, sinks, mask_tables, 1,
                        MASK, TRAITS, CAP, EARLY, HAS_SINKS, GROUPS, STAGES, COLUMNS, WIDTH, VALUES, PACK, SHARE,
                        OVERLAP, FIXED_MAX)),
            (_load, (inputs, buffers, barriers, shape, sources, GROUPS, STAGES, COLUMNS, PACK, OVERLAP,
                     FIXED_MAX)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    elif GROUPS == 3:
        gl.warp_specialize([
            (_consume, (outputs, buffers, barriers, shape, tables, numbers, factor, sinks, mask_tables, 0,
                        MASK, TRAITS, CAP, EARLY, HAS_SINKS, GROUPS, STAGES, COLUMNS, WIDTH, VALUES, PACK, SHARE,
                        OVERLAP, FIXED_MAX)),
            (_consume, (outputs, buffers, barriers, shape, tables, numbers, factor, sinks, mask_tables, 1,
                        MASK, TRAITS, CAP, EARLY, HAS_SINKS, GROUPS, STAGES, COLUMNS, WIDTH, VALUES, PACK, SHARE,
                        OVERLAP, FIXED_MAX)),
            (_consume, (outputs, buffers, barriers, shape, tables, numbers, factor, sinks, mask_tables, 2,
                        MASK, TRAITS, CAP, EARLY, HAS_SINKS, GROUPS, STAGES, COLUMNS, WIDTH, VALUES, PACK, SHARE,
                        OVERLAP, FIXED_MAX)),
            (_load, (inputs, buffers, barriers, shape, sources, GROUPS, STAGES, COLUMNS, PACK, OVERLAP,
                     FIXED_MAX)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (outputs, buffers, barriers, shape, tables, numbers, factor, sinks, mask_tables, 0,
                        MASK, TRAITS, CAP, EARLY, HAS_SINKS, GROUPS, STAGES, COLUMNS, WIDTH, VALUES, PACK, SHARE,
                        OVERLAP, FIXED_MAX)),
            (_consume, (outputs, buffers, barriers, shape, tables, numbers, factor, sinks, mask_tables, 1,
                        MASK, TRAITS, CAP, EARLY, HAS_SINKS, GROUPS, STAGES, COLUMNS, WIDTH, VALUES, PACK, SHARE,
                        OVERLAP, FIXED_MAX)),
            (_consume, (outputs, buffers, barriers, shape, tables, numbers, factor, sinks, mask_tables, 2,
                        MASK, TRAITS, CAP, EARLY, HAS_SINKS, GROUPS, STAGES, COLUMNS, WIDTH, VALUES, PACK, SHARE,
                        OVERLAP, FIXED_MAX)),
            (_consume, (outputs, buffers, barriers, shape, tables, numbers, factor, sinks, mask_tables, 3,
                        MASK, TRAITS, CAP, EARLY, HAS_SINKS, GROUPS, STAGES, COLUMNS, WIDTH, VALUES, PACK, SHARE,
                        OVERLAP, FIXED_MAX)),
            (_load, (inputs, buffers, barriers, shape, sources, GROUPS, STAGES, COLUMNS, PACK, OVERLAP,
                     FIXED_MAX)),
        ], [4, 4, 4, 1], [REGISTERS, REGISTERS, REGISTERS, 24])  # fmt: skip
