"""Attention forward on Hopper: one warp loads tiles, warpgroups multiply them, and neither waits for the other.

A program stays on its multiprocessor and takes one item after another: 64 rows of queries for each consumer warpgroup,
against the key tiles that the mask leaves. The loading warp runs ahead, into the next item as well, so that Q, K and V
of the next item arrive while this one is finished and stored. Within a warpgroup, S = Q K^T of the next tile is issued
before O += P V of this one: the tensor cores work while the exponentials are computed.

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


@gluon.jit
def _position(step, items):
    """Which item a program takes at a step: forwards and backwards in turn, so that long and short ones even out."""
    programs = gl.num_programs(0)
    program = gl.program_id(0)
    return step * programs + gl.where(step % 2 == 0, program, programs - 1 - program)


@gluon.jit
def _steps(items):
    """How many items this program takes."""
    whole = items // gl.num_programs(0)
    return whole + gl.where(_position(whole, items) < items, 1, 0)


@gluon.jit
def _item(position, tiles, lines, together, heads, PACK: gl.constexpr):
    """(tile, batch, first head) of an item: last tiles first, since they are the longest under a causal mask, for
    `together` heads at a time, whose keys and values then stay in L2."""
    block = position // (tiles * together)
    inside = position - block * tiles * together
    here = gl.minimum(together, lines - block * together)
    line = block * together + inside % here
    b = line // (heads // PACK)
    return tiles - 1 - inside // here, b, (line - b * (heads // PACK)) * PACK


@gluon.jit
def _load(inputs, buffers, barriers, shape, tables, GROUPS: gl.constexpr, STAGES: gl.constexpr, COLUMNS: gl.constexpr,
          PACK: gl.constexpr):  # fmt: skip
    """The loading warp."""
    q, k, v = inputs
    q_tiles, k_tiles, v_tiles, _ = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    items, tiles, lines, together, heads, group, _ = shape
    runs, counts, most_runs, by_batch, by_head = tables
    PART: gl.constexpr = 64 // PACK  # queries of a warpgroup
    loaded = 0
    for step in range(_steps(items)):
        tile, b, h = _item(_position(step, items), tiles, lines, together, heads, PACK)
        place = b.to(gl.int64) * by_batch + h * by_head + tile
        count = gl.load(counts + place)
        for w in gl.static_range(GROUPS):
            mbarrier.wait(q_empty.index(w), (step & 1) ^ 1)
            mbarrier.expect(q_full.index(w), q.block_type.nbytes)
            load_tile(q, [b, (tile * GROUPS + w) * PART, h, 0], q_full.index(w), q_tiles.index(w))
        pair = h // group
        for run in range(count):
            begin = gl.load(runs + (place * most_runs + run) * 3)
            end = gl.load(runs + (place * most_runs + run) * 3 + 1)
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


@gluon.jit
def _skip(barriers, used, count, STAGES: gl.constexpr):
    """Hand back tiles that only the other warpgroups need."""
    k_full, k_empty, v_full, v_empty = barriers
    for _ in range(count):
        stage = used % STAGES
        phase = (used // STAGES) & 1
        mbarrier.wait(k_full.index(stage), phase)
        mbarrier.arrive(k_empty.index(stage), count=1)
        mbarrier.wait(v_full.index(stage), phase)
        mbarrier.arrive(v_empty.index(stage), count=1)
        used += 1
    return used


@gluon.jit
def _scores(s, index, masked, b, h, query, numbers, mask_tables, MASK: gl.constexpr, CAP: gl.constexpr,
            EARLY: gl.constexpr, COLUMNS: gl.constexpr, SCORES: gl.constexpr):  # fmt: skip
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
            seen = seen & MASK(b, h, query[:, None], key, queries, keys, mask_tables)
        s = gl.where(seen, s, float("-inf"))
    return s


@gluon.jit
def _walk(query_tile, k_tiles, v_tiles, barriers, q_empty, used, own, state, b, h, query, factor, numbers, mask_tables,
          MASK: gl.constexpr, CAP: gl.constexpr, EARLY: gl.constexpr, STAGES: gl.constexpr, COLUMNS: gl.constexpr,
          WIDTH: gl.constexpr, VALUES: gl.constexpr, SHARE: gl.constexpr, SCORES: gl.constexpr,
          OUTPUT: gl.constexpr):  # fmt: skip
    """(output, top, total) of 64 rows over `own` > 0 key tiles."""
    k_full, k_empty, v_full, v_empty = barriers
    runs, index, end, masked = state
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, OUTPUT, 2)
    dtype: gl.constexpr = k_tiles.dtype
    nothing = gl.zeros([64, COLUMNS], gl.float32, SCORES)
    stage = used % STAGES
    mbarrier.wait(k_full.index(stage), (used // STAGES) & 1)
    keys_tile = k_tiles.index(stage).reshape([COLUMNS, WIDTH])
    s = warpgroup_mma(query_tile, keys_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_empty.index(stage), count=1)
    s = _scores(s, index, masked, b, h, query, numbers, mask_tables, MASK, CAP, EARLY, COLUMNS, SCORES)
    top = gl.max(s, 1) * factor  # [64], in powers of two
    p = gl.exp2(s * factor - gl.where(top == float("-inf"), 0.0, top)[:, None])  # [64, COLUMNS]
    total = gl.sum(p, 1)
    weight = gl.convert_layout(p.to(dtype), OPERAND)
    output = gl.zeros([64, VALUES], gl.float32, OUTPUT)
    for _ in range(1, own):
        v_stage = used % STAGES
        v_phase = (used // STAGES) & 1
        used += 1
        stage = used % STAGES
        phase = (used // STAGES) & 1
        index += 1
        if index == end:  # the next run
            runs += 3
            index = gl.load(runs)
            end = gl.load(runs + 1)
            masked = gl.load(runs + 2)
        mbarrier.wait(k_full.index(stage), phase)
        keys_tile = k_tiles.index(stage).reshape([COLUMNS, WIDTH])
        s_later = warpgroup_mma(query_tile, keys_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(v_stage), v_phase)
        values_tile = v_tiles.index(v_stage).reshape([COLUMNS, VALUES])
        output_later = warpgroup_mma(weight, values_tile, output, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s_later])
        mbarrier.arrive(k_empty.index(stage), count=1)
        s = _scores(s, index, masked, b, h, query, numbers, mask_tables, MASK, CAP, EARLY, COLUMNS, SCORES)
        higher = gl.maximum(top, gl.max(s, 1) * factor)
        anchor = gl.where(higher == float("-inf"), 0.0, higher)
        rescale = gl.exp2(top - anchor)
        p = gl.exp2(s * factor - anchor[:, None])
        total = total * rescale + gl.sum(p, 1)
        top = higher
        output = warpgroup_mma_wait(0, deps=[output_later])
        mbarrier.arrive(v_empty.index(v_stage), count=1)
        output = output * gl.convert_layout(rescale, gl.SliceLayout(1, OUTPUT))[:, None]
        weight = gl.convert_layout(p.to(dtype), OPERAND)
    if not SHARE:
        mbarrier.arrive(q_empty, count=1)
    stage = used % STAGES
    mbarrier.wait(v_full.index(stage), (used // STAGES) & 1)
    output_later = warpgroup_mma(weight, v_tiles.index(stage).reshape([COLUMNS, VALUES]), output, is_async=True)
    output = warpgroup_mma_wait(0, deps=[output_later])
    mbarrier.arrive(v_empty.index(stage), count=1)
    return output, top, total


@gluon.jit
def _consume(outputs, buffers, barriers, shape, tables, numbers, factor, sinks, mask_tables, w: gl.constexpr,
             MASK: gl.constexpr, CAP: gl.constexpr, EARLY: gl.constexpr, HAS_SINKS: gl.constexpr, GROUPS: gl.constexpr,
             STAGES: gl.constexpr, COLUMNS: gl.constexpr, WIDTH: gl.constexpr, VALUES: gl.constexpr,
             PACK: gl.constexpr, SHARE: gl.constexpr):  # fmt: skip
    """Warpgroup `w`: 64 rows of every item."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, VALUES, 16])
    PART: gl.constexpr = 64 // PACK
    o, lse = outputs
    q_tiles, k_tiles, v_tiles, o_tiles = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    items, tiles, lines, together, heads, _, queries = shape
    runs, plans, most_runs, by_batch, by_head = tables
    pipeline = (k_full, k_empty, v_full, v_empty)
    row = gl.arange(0, 64, gl.SliceLayout(1, SCORES))
    query_tile = q_tiles.index(w).reshape([64, WIDTH])
    output_tile = o_tiles.index(w).reshape([64, VALUES])
    used = 0  # tiles of this program so far: says the stage and the phase
    steps = _steps(items)
    for step in range(steps):
        tile, b, h = _item(_position(step, items), tiles, lines, together, heads, PACK)
        place = (b.to(gl.int64) * by_batch + h * by_head + tile) * GROUPS + w
        lead = gl.load(plans + place * 3)
        own = gl.load(plans + place * 3 + 1)
        trail = gl.load(plans + place * 3 + 2)
        first = runs + place * most_runs * 3
        index = gl.load(first)
        end = gl.load(first + 1)
        masked = gl.load(first + 2)
        query = (tile * GROUPS + w) * PART + row // PACK  # [64]
        used = _skip(pipeline, used, lead, STAGES)
        mbarrier.wait(q_full.index(w), step & 1)
        if own > 0:
            output, top, total = _walk(
                query_tile, k_tiles, v_tiles, pipeline, q_empty.index(w), used, own, (first, index, end, masked), b, h,
                query, factor, numbers, mask_tables, MASK, CAP, EARLY, STAGES, COLUMNS, WIDTH, VALUES, SHARE,
                SCORES, OUTPUT,
            )  # fmt: skip
        else:
            if not SHARE:
                mbarrier.arrive(q_empty.index(w), count=1)
            output = gl.zeros([64, VALUES], gl.float32, OUTPUT)
            top = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
            total = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))
        used = _skip(pipeline, used + own, trail, STAGES)
        head = h + row % PACK  # [64]
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
        output = output * gl.convert_layout(share, gl.SliceLayout(1, OUTPUT))[:, None]
        if not SHARE:
            tma.store_wait(0)  # the last item's output has left the buffer
        output_tile.store(output.to(o.dtype))
        fence_async_shared()
        store_tile(o, [b, (tile * GROUPS + w) * PART, h, 0], o_tiles.index(w))
        if SHARE:  # only now may the next queries come
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index(w), count=1)
    tma.store_wait(0)


# Whether these are multiples of 16 makes no difference here, and would only compile the kernel again.
_SIZES = (
    "most_runs", "most_loads", "by_batch", "by_head", "items", "tiles", "lines", "together", "heads", "queries", "keys",
)  # fmt: skip


@gluon.jit(do_not_specialize_on_alignment=_SIZES)
def attention_forward(
    lse, q, k, v, o, sinks, mask_tables, runs, plans, loads, counts, most_runs, most_loads, by_batch, by_head,
    items, tiles, lines, together, heads, group, queries, keys, factor, scale, softcap,
    MASK: gl.constexpr, CAP: gl.constexpr, EARLY: gl.constexpr, HAS_SINKS: gl.constexpr, GROUPS: gl.constexpr,
    STAGES: gl.constexpr, COLUMNS: gl.constexpr, WIDTH: gl.constexpr, VALUES: gl.constexpr, PACK: gl.constexpr,
    SHARE: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    PART: gl.constexpr = 64 // PACK
    q_tiles = gl.allocate_shared_memory(q.dtype, [GROUPS, 1, PART, PACK, WIDTH], q.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [STAGES, 1, COLUMNS, 1, WIDTH], k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [STAGES, 1, COLUMNS, 1, VALUES], v.layout)
    if SHARE:
        o_tiles = q_tiles
    else:
        o_tiles = gl.allocate_shared_memory(o.dtype, [GROUPS, 1, PART, PACK, VALUES], o.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for w in gl.static_range(GROUPS):
        mbarrier.init(q_full.index(w), count=1)
        mbarrier.init(q_empty.index(w), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=GROUPS)
        mbarrier.init(v_empty.index(stage), count=GROUPS)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    inputs, outputs = (q, k, v), (o, lse)
    buffers = (q_tiles, k_tiles, v_tiles, o_tiles)
    shape = (items, tiles, lines, together, heads, group, queries)
    tables = (runs, plans, most_runs, by_batch, by_head)
    sources = (loads, counts, most_loads, by_batch, by_head)
    numbers = (queries, keys, scale, softcap)
    if GROUPS == 2:
        gl.warp_specialize([
            (_consume, (outputs, buffers, barriers, shape, tables, numbers, factor, sinks, mask_tables, 0,
                        MASK, CAP, EARLY, HAS_SINKS, GROUPS, STAGES, COLUMNS, WIDTH, VALUES, PACK, SHARE)),
            (_consume, (outputs, buffers, barriers, shape, tables, numbers, factor, sinks, mask_tables, 1,
                        MASK, CAP, EARLY, HAS_SINKS, GROUPS, STAGES, COLUMNS, WIDTH, VALUES, PACK, SHARE)),
            (_load, (inputs, buffers, barriers, shape, sources, GROUPS, STAGES, COLUMNS, PACK)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (outputs, buffers, barriers, shape, tables, numbers, factor, sinks, mask_tables, 0,
                        MASK, CAP, EARLY, HAS_SINKS, GROUPS, STAGES, COLUMNS, WIDTH, VALUES, PACK, SHARE)),
            (_consume, (outputs, buffers, barriers, shape, tables, numbers, factor, sinks, mask_tables, 1,
                        MASK, CAP, EARLY, HAS_SINKS, GROUPS, STAGES, COLUMNS, WIDTH, VALUES, PACK, SHARE)),
            (_consume, (outputs, buffers, barriers, shape, tables, numbers, factor, sinks, mask_tables, 2,
                        MASK, CAP, EARLY, HAS_SINKS, GROUPS, STAGES, COLUMNS, WIDTH, VALUES, PACK, SHARE)),
            (_load, (inputs, buffers, barriers, shape, sources, GROUPS, STAGES, COLUMNS, PACK)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip
