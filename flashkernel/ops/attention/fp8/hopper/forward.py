"""FP8 attention forward on Hopper: the walk of the half-precision kernel, with both products in e4m3.

The tensor cores take eight-bit operands only with the summed index side by side in memory. For S = Q K^T that is how Q
and K lie; for O = P V it asks for V with its keys side by side, and TMA brings tiles of V^T as they are.

P goes from the registers that S was accumulated in to those that the second product reads from. In groups of 16 keys,
a thread has columns 2t, 2t + 1, 8 + 2t, 9 + 2t of S, but is asked for 4t to 4t + 3 of P. So the keys come in another
order: TMA sees K in quads, key = 4 quad + 2 pair + one, and brings all first pairs and then all second ones. Column
(pair, quad, one) of S is then, as (quad, pair, one), the operand: its registers under other names.

P is scaled by 2^8, so that e4m3 has all its bits from 2^-14 to 1. Q's and K's scales join the factor inside the
exponent; O is kept in units of the current tile's V scale, changed by the multiplication that the online softmax makes
anyway.
"""

from flashkernel.blocks.softmax_triton import LN2, LOG2E, brought_together, tanh
from flashkernel.core.gluon import (
    fence_async_shared,
    gl,
    gluon,
    load_tile,
    mbarrier,
    new_barriers,
    store_tile,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashkernel.ops.attention.fp8.hopper.assembly import (
    FOUR_TO_E4M3,
    POWERS,
    POWERS_OPERANDS,
    RESCALED,
    RESCALED_OPERANDS,
)
from flashkernel.ops.attention.hopper.schedule import after, item, skip

HEADROOM = gl.constexpr(8.0)  # P is at most 2^8; the largest e4m3 is 448
LARGEST = gl.constexpr(256.0)
SCALE_BLOCK = gl.constexpr(128)  # tokens that share a scale


@gluon.jit
def _load(inputs, buffers, barriers, shape, tables, GROUPS: gl.constexpr, STAGES: gl.constexpr, COLUMNS: gl.constexpr,
          WIDTH: gl.constexpr, PACK: gl.constexpr):  # fmt: skip
    """The loading warp."""
    q, k, v = inputs
    q_tiles, k_tiles, v_tiles, _ = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    order, tiles, heads, group, _ = shape
    runs, counts, most_runs, by_batch, by_head = tables
    PART: gl.constexpr = 64 // PACK  # queries of a warpgroup
    loaded = 0
    step = 0
    number = gl.load(order)
    while number >= 0:
        tile, b, h = item(number, tiles, heads, PACK)
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
                quads = [b, 0, index * (COLUMNS // 4), 0, pair * WIDTH]
                load_tile(k, quads, k_full.index(stage), k_tiles.index(stage))
                mbarrier.wait(v_empty.index(stage), phase ^ 1)
                mbarrier.expect(v_full.index(stage), v.block_type.nbytes)
                load_tile(v, [b, pair, 0, index * COLUMNS], v_full.index(stage), v_tiles.index(stage))
                loaded += 1
        step += 1
        number = gl.load(order + step)


@gluon.jit
def _scores(s, factor, index, masked, b, h, query, numbers, mask_tables, MASK: gl.constexpr, CAP: gl.constexpr,
            EARLY: gl.constexpr, COLUMNS: gl.constexpr, SCORES: gl.constexpr):  # fmt: skip
    """[64, COLUMNS] products as they go into the softmax, columns ordered as (pair, quad, one)."""
    queries, keys, softcap = numbers
    if CAP:
        s = (softcap * LOG2E) * tanh(s * (factor / softcap)[:, None])
    elif EARLY:
        s = s * factor[:, None]
    if masked != 0:
        column = gl.arange(0, COLUMNS, gl.SliceLayout(0, SCORES))
        quad = (column % (COLUMNS // 2)) // 2
        key = (index * COLUMNS + 4 * quad + 2 * (column // (COLUMNS // 2)) + column % 2)[None, :]  # [1, COLUMNS]
        seen = key < keys
        if MASK is not None:
            seen = seen & MASK(b, h, query[:, None], key, queries, keys, mask_tables)
        s = gl.where(seen, s, float("-inf"))
    return s


@gluon.jit
def _row_max(s, COLUMNS: gl.constexpr, SCORES: gl.constexpr):
    """The largest of each row; eight columns at a time, since one long chain of comparisons is all latency."""
    parts = gl.max(s.reshape([64, COLUMNS // 8, 8]), 1)  # [64, 8]
    return gl.convert_layout(gl.max(parts, 1), gl.SliceLayout(1, SCORES))


@gluon.jit
def _softmax(s, top, factor, EARLY: gl.constexpr, POLYNOMIAL: gl.constexpr, COLUMNS: gl.constexpr,
             SCORES: gl.constexpr):  # fmt: skip
    """(weights [64, COLUMNS], what older weights are multiplied by, the new top)."""
    if EARLY:
        factor = gl.full([64], 1.0, gl.float32, gl.SliceLayout(1, SCORES))
    higher = gl.maximum(top, _row_max(s, COLUMNS, SCORES) * factor)
    base = gl.where(higher == float("-inf"), 0.0, higher)
    rescale = gl.exp2(top - base)
    shift = HEADROOM - base
    if POLYNOMIAL == 0:
        p = gl.exp2(s * factor[:, None] + shift[:, None])
    else:
        numbers = [s, factor[:, None], shift[:, None], (factor / 256)[:, None], ((shift + 127) / 256)[:, None]]
        p = gl.inline_asm_elementwise(
            POWERS[POLYNOMIAL], POWERS_OPERANDS, numbers, dtype=gl.float32, is_pure=True, pack=8
        )  # fmt: skip
    return p, rescale, higher


@gluon.jit
def _operand(p, COLUMNS: gl.constexpr, OPERAND: gl.constexpr):
    """[64, COLUMNS] weights with their keys in order, in e4m3."""
    p = p.reshape([64, 2, COLUMNS // 4, 2]).permute(0, 2, 1, 3).reshape([64, COLUMNS])
    p = gl.convert_layout(p, OPERAND)
    return gl.inline_asm_elementwise(FOUR_TO_E4M3, "=r,f,f,f,f", [p], dtype=gl.float8e4nv, is_pure=True, pack=4)


@gluon.jit
def _rescaled(output, rescale, WIDTH: gl.constexpr, OUTPUT: gl.constexpr):
    """[64, WIDTH] output times [64] rescale, which is one for most rows: a warp whose rows all have it skips."""
    rescale = gl.convert_layout(rescale, gl.SliceLayout(1, OUTPUT))
    return gl.inline_asm_elementwise(
        RESCALED[WIDTH], RESCALED_OPERANDS[WIDTH], [output, rescale[:, None]], dtype=gl.float32, is_pure=True,
        pack=WIDTH // 2,
    )  # fmt: skip


@gluon.jit
def _pass_over(pipeline, used, count, STAGES: gl.constexpr):
    """Hand back tiles that only the other warpgroups need."""
    skip(pipeline, (used % STAGES, (used // STAGES) & 1), count, STAGES)
    return used + count


@gluon.jit
def _walk(query_tile, k_tiles, v_tiles, barriers, q_empty, used, own, state, b, h, query, factor, scales, numbers,
          mask_tables, w: gl.constexpr, MASK: gl.constexpr, CAP: gl.constexpr, EARLY: gl.constexpr,
          BLOCKED: gl.constexpr, POLYNOMIAL: gl.constexpr, GROUPS: gl.constexpr,
          STAGES: gl.constexpr, COLUMNS: gl.constexpr, WIDTH: gl.constexpr, SCORES: gl.constexpr,
          OUTPUT: gl.constexpr):  # fmt: skip
    """(output, top, total, scale of the output) of 64 rows over `own` > 0 key tiles; `factor` [64] lacks k's scale."""
    k_full, k_empty, v_full, v_empty = barriers
    runs, index, end, masked = state
    k_scale, v_scale, k_step, v_step = scales
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, OUTPUT, 4)
    READY: gl.constexpr = EARLY or CAP  # scores come to the softmax in powers of two
    nothing = gl.zeros([64, COLUMNS], gl.float32, SCORES)
    block = index * COLUMNS // SCALE_BLOCK
    whole = factor * gl.load(k_scale + block * k_step)  # [64]
    unit = gl.load(v_scale + block * v_step)
    stage = used % STAGES
    phase = (used // STAGES) & 1
    mbarrier.wait(k_full.index(stage), phase)
    keys_tile = k_tiles.index(stage).reshape([COLUMNS, WIDTH])
    s_later = warpgroup_mma(query_tile, keys_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s_later])
    mbarrier.arrive(k_empty.index(stage), count=1)
    s = _scores(s, whole, index, masked, b, h, query, numbers, mask_tables, MASK, CAP, EARLY, COLUMNS, SCORES)
    top = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))  # in powers of two
    p, _, top = _softmax(s, top, whole, READY, POLYNOMIAL, COLUMNS, SCORES)
    parts = gl.sum(p.reshape([64, COLUMNS // 8, 8]), 1)  # [64, 8]: sums that need no other thread
    PARTS: gl.constexpr = gl.SliceLayout(1, parts.type.layout)
    output = gl.zeros([64, WIDTH], gl.float32, OUTPUT)
    ahead, ahead_phase = after((stage, phase), STAGES)
    mbarrier.wait(v_full.index(stage), phase)
    mbarrier.wait(k_full.index(ahead), ahead_phase, pred=own > 1)
    first = index + 1
    left = own - 1
    while left > 0:  # a loop for each run, so that none of its steps asks where it ends
        if first == end:  # the next run
            runs += 3
            first = gl.load(runs)
            end = gl.load(runs + 1)
            masked = gl.load(runs + 2)
        for index in range(first, end):
            weight = _operand(p, COLUMNS, OPERAND)  # here, since bytes carried around the loop take a register each
            v_stage = stage
            stage = ahead
            phase = ahead_phase
            ahead, ahead_phase = after((stage, phase), STAGES)
            used += 1
            if BLOCKED:
                block = index * COLUMNS // SCALE_BLOCK
                whole = factor * gl.load(k_scale + block * k_step)
                unit_before = unit
                unit = gl.load(v_scale + block * v_step)
            keys_tile = k_tiles.index(stage).reshape([COLUMNS, WIDTH])
            s_later = warpgroup_mma(query_tile, keys_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
            values_tile = v_tiles.index(v_stage).reshape([WIDTH, COLUMNS]).permute((1, 0))
            output_later = warpgroup_mma(weight, values_tile, output, is_async=True)
            s = warpgroup_mma_wait(1, deps=[s_later])
            s = _scores(s, whole, index, masked, b, h, query, numbers, mask_tables, MASK, CAP, EARLY, COLUMNS, SCORES)
            p, rescale, top = _softmax(s, top, whole, READY, POLYNOMIAL, COLUMNS, SCORES)
            parts = parts * gl.convert_layout(rescale, PARTS)[:, None] + gl.sum(p.reshape([64, COLUMNS // 8, 8]), 1)
            if BLOCKED:
                rescale = rescale * (unit_before / unit)
            # What the next step reads is awaited here and not there: ptxas moves the wait for the product up to the
            # last branch, and without these the product would be over before the exponentials begin.
            mbarrier.wait(v_full.index(stage), phase)
            mbarrier.wait(k_full.index(ahead), ahead_phase, pred=left > 1)
            output = warpgroup_mma_wait(0, deps=[output_later])
            mbarrier.arrive(k_empty.index(stage), count=1)
            mbarrier.arrive(v_empty.index(v_stage), count=1)
            output = _rescaled(output, rescale, WIDTH, OUTPUT)
            left -= 1
        first = end
    mbarrier.arrive(q_empty, count=1)
    weight = _operand(p, COLUMNS, OPERAND)
    values_tile = v_tiles.index(stage).reshape([WIDTH, COLUMNS]).permute((1, 0))
    output_later = warpgroup_mma(weight, values_tile, output, is_async=True)
    output = warpgroup_mma_wait(0, deps=[output_later])
    mbarrier.arrive(v_empty.index(stage), count=1)
    total = gl.convert_layout(gl.sum(parts, 1), gl.SliceLayout(1, SCORES))
    return output, top, total, unit


@gluon.jit
def _consume(outputs, buffers, barriers, shape, tables, scales, numbers, scale, sinks, mask_tables, w: gl.constexpr,
             MASK: gl.constexpr, CAP: gl.constexpr, EARLY: gl.constexpr, HAS_SINKS: gl.constexpr,
             BLOCKED: gl.constexpr, POLYNOMIAL: gl.constexpr, GROUPS: gl.constexpr,
             STAGES: gl.constexpr, COLUMNS: gl.constexpr, WIDTH: gl.constexpr, PACK: gl.constexpr):  # fmt: skip
    """Warpgroup `w`: 64 rows of every item."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    PART: gl.constexpr = 64 // PACK
    o, lse = outputs
    q_tiles, k_tiles, v_tiles, o_tiles = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    order, tiles, heads, group, queries = shape
    runs, plans, most_runs, by_batch, by_head = tables
    q_scale, k_scale, v_scale, q_blocks, k_blocks, v_blocks, q_step, k_step, v_step = scales
    pipeline = (k_full, k_empty, v_full, v_empty)
    row = gl.arange(0, 64, gl.SliceLayout(1, SCORES))
    query_tile = q_tiles.index(w).reshape([64, WIDTH])
    output_tile = o_tiles.index(w).reshape([64, WIDTH])
    used = 0  # tiles of this program so far: says the stage and the phase
    step = 0
    number = gl.load(order)
    while number >= 0:
        tile, b, h = item(number, tiles, heads, PACK)
        place = (b.to(gl.int64) * by_batch + h * by_head + tile) * GROUPS + w
        lead = gl.load(plans + place * 3)
        own = gl.load(plans + place * 3 + 1)
        trail = gl.load(plans + place * 3 + 2)
        first = runs + place * most_runs * 3
        index = gl.load(first)
        end = gl.load(first + 1)
        masked = gl.load(first + 2)
        query = (tile * GROUPS + w) * PART + row // PACK  # [64]
        head = h + row % PACK  # [64]
        q_place = (b * heads + head) * q_blocks + gl.minimum(query, queries - 1) // SCALE_BLOCK * q_step
        factor = gl.load(q_scale + q_place) * scale  # [64]
        pair = b * (heads // group) + h // group
        used = _pass_over(pipeline, used, lead, STAGES)
        mbarrier.wait(q_full.index(w), step & 1)
        if own > 0:
            output, top, total, unit = _walk(
                query_tile, k_tiles, v_tiles, pipeline, q_empty.index(w), used, own, (first, index, end, masked),
                b, h, query, factor, (k_scale + pair * k_blocks, v_scale + pair * v_blocks, k_step, v_step), numbers,
                mask_tables, w, MASK, CAP, EARLY, BLOCKED, POLYNOMIAL, GROUPS, STAGES, COLUMNS, WIDTH, SCORES,
                OUTPUT,
            )  # fmt: skip
        else:
            mbarrier.arrive(q_empty.index(w), count=1)
            output = gl.zeros([64, WIDTH], gl.float32, OUTPUT)
            top = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
            total = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))
            unit = gl.load(v_scale)  # of nothing
        used = _pass_over(pipeline, used + own, trail, STAGES)
        if HAS_SINKS:  # one more column, in the denominator only
            sink = gl.load(sinks + head).to(gl.float32) * LOG2E
            rescale, extra, top = brought_together(top, sink)
            total = total * rescale + extra * LARGEST
            share = gl.where(total == 0.0, 0.0, rescale * unit / total)
        else:
            share = gl.where(total == 0.0, 0.0, unit / total)
        log_sum = gl.where(total == 0.0, float("-inf"), (top - HEADROOM + gl.log2(total)) * LN2)
        gl.store(lse + (b.to(gl.int64) * heads + head) * queries + query, log_sum, mask=query < queries)
        output = output * gl.convert_layout(share, gl.SliceLayout(1, OUTPUT))[:, None]
        tma.store_wait(0)  # the last item's output has left the buffer
        output_tile.store(output.to(o.dtype))
        fence_async_shared()
        store_tile(o, [b, (tile * GROUPS + w) * PART, h, 0], o_tiles.index(w))
        step += 1
        number = gl.load(order + step)
    tma.store_wait(0)


# Whether these are multiples of 16 makes no difference here, and would only compile the kernel again.
_SIZES = (
    "most_items", "most_runs", "most_loads", "by_batch", "by_head", "tiles", "heads", "queries", "keys",
    "q_blocks", "k_blocks", "v_blocks",
)  # fmt: skip


@gluon.jit(do_not_specialize_on_alignment=_SIZES)
def attention_forward_fp8(
    lse, q, k, v, o, sinks, q_scale, k_scale, v_scale, mask_tables, runs, plans, loads, counts, orders, most_items,
    most_runs, most_loads, by_batch, by_head, tiles, heads, group, queries, keys, q_blocks, k_blocks, v_blocks, scale,
    softcap,
    MASK: gl.constexpr, CAP: gl.constexpr, EARLY: gl.constexpr, HAS_SINKS: gl.constexpr, Q_STEP: gl.constexpr,
    K_STEP: gl.constexpr, V_STEP: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, COLUMNS: gl.constexpr,
    WIDTH: gl.constexpr, PACK: gl.constexpr, POLYNOMIAL: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    PART: gl.constexpr = 64 // PACK
    BLOCKED: gl.constexpr = K_STEP + V_STEP > 0
    q_tiles = gl.allocate_shared_memory(q.dtype, [GROUPS, 1, PART, PACK, WIDTH], q.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 2, COLUMNS // 4, 2, WIDTH], k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [STAGES, 1, 1, WIDTH, COLUMNS], v.layout)
    o_tiles = gl.allocate_shared_memory(o.dtype, [GROUPS, 1, PART, PACK, WIDTH], o.layout)
    q_full = new_barriers(GROUPS, 1)
    q_empty = new_barriers(GROUPS, 1)
    k_full = new_barriers(STAGES, 1)
    k_empty = new_barriers(STAGES, GROUPS)
    v_full = new_barriers(STAGES, 1)
    v_empty = new_barriers(STAGES, GROUPS)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    inputs, outputs = (q, k, v), (o, lse)
    buffers = (q_tiles, k_tiles, v_tiles, o_tiles)
    shape = (orders + gl.program_id(0) * most_items, tiles, heads, group, queries)
    tables = (runs, plans, most_runs, by_batch, by_head)
    sources = (loads, counts, most_loads, by_batch, by_head)
    scales = (q_scale, k_scale, v_scale, q_blocks, k_blocks, v_blocks, Q_STEP, K_STEP, V_STEP)
    numbers = (queries, keys, softcap)
    if GROUPS == 2:
        gl.warp_specialize([
            (_consume, (outputs, buffers, barriers, shape, tables, scales, numbers, scale, sinks, mask_tables, 0,
                        MASK, CAP, EARLY, HAS_SINKS, BLOCKED, POLYNOMIAL, GROUPS, STAGES, COLUMNS, WIDTH, PACK)),
            (_consume, (outputs, buffers, barriers, shape, tables, scales, numbers, scale, sinks, mask_tables, 1,
                        MASK, CAP, EARLY, HAS_SINKS, BLOCKED, POLYNOMIAL, GROUPS, STAGES, COLUMNS, WIDTH, PACK)),
            (_load, (inputs, buffers, barriers, shape, sources, GROUPS, STAGES, COLUMNS, WIDTH, PACK)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (outputs, buffers, barriers, shape, tables, scales, numbers, scale, sinks, mask_tables, 0,
                        MASK, CAP, EARLY, HAS_SINKS, BLOCKED, POLYNOMIAL, GROUPS, STAGES, COLUMNS, WIDTH, PACK)),
            (_consume, (outputs, buffers, barriers, shape, tables, scales, numbers, scale, sinks, mask_tables, 1,
                        MASK, CAP, EARLY, HAS_SINKS, BLOCKED, POLYNOMIAL, GROUPS, STAGES, COLUMNS, WIDTH, PACK)),
            (_consume, (outputs, buffers, barriers, shape, tables, scales, numbers, scale, sinks, mask_tables, 2,
                        MASK, CAP, EARLY, HAS_SINKS, BLOCKED, POLYNOMIAL, GROUPS, STAGES, COLUMNS, WIDTH, PACK)),
            (_load, (inputs, buffers, barriers, shape, sources, GROUPS, STAGES, COLUMNS, WIDTH, PACK)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip
