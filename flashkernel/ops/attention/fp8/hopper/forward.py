"""FP8 attention forward on Hopper: the walk of the half-precision kernel, with both products in e4m3.

The tensor cores take eight-bit operands only with the summed index side by side in memory. For S = Q K^T that is how Q
and K lie; for O = P V it asks for V with its keys side by side, and TMA brings tiles of V^T as they are.

P goes from the registers that S was accumulated in to those that the second product reads from. In groups of 16 keys,
a thread has columns 2t, 2t + 1, 8 + 2t, 9 + 2t of S, but is asked for 4t to 4t + 3 of P. So the keys come in another
order: TMA sees K in quads, key = 4 quad + 2 pair + one, and brings all first pairs and then all second ones. Column
(pair, quad, one) of S is then, as (quad, pair, one), the operand: its registers under other names.

Weights are scaled to where e4m3 has all its bits. A LAZY walk puts the largest of its first tile at 2^4, and lifts a
row only when the sums of a later tile say that a weight may be beyond 448; what may have overflown float32 is flagged
and done again. Other walks, and what is done again, have the largest so far at 2^8. Q's and K's scales join the factor
in the exponent; O is kept in units of the current tile's V scale, changed by the multiplication that rescales it.
"""

from flashkernel.blocks.softmax_triton import LN2, LOG2E, merge_row_max, tanh
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
from flashkernel.ops.attention.fp8.hopper.assembly import (
    FOUR_TO_E4M3,
    POWERS,
    POWERS_OPERANDS,
    RESCALED,
    RESCALED_OPERANDS,
)
from flashkernel.ops.attention.hopper.overflow_retry import MOST, any_flagged, clear, flag, next_work_tile, stores_done
from flashkernel.ops.attention.hopper.schedule import (
    after,
    claim_all,
    claim_keys,
    claim_values,
    place_of,
    return_keys,
    return_values,
    skip,
)
from flashkernel.ops.attention.hopper.softmax import largest, sums_of

HEADROOM = gl.constexpr(8.0)  # P is at most 2^8; the largest e4m3 is 448
LARGEST = gl.constexpr(256.0)
# A lazy walk: its first tile's largest weight, what a lifted row's largest sum is at least, and what is too far to lift
ANCHOR = gl.constexpr(4.0)  # in powers of two, as are the next two
LIFTED = gl.constexpr(5)
FARTHEST = gl.constexpr(100)
MOST_E4M3 = gl.constexpr(448.0)
LEAST = gl.constexpr(15.0)  # of a row's sum: 2^ANCHOR and above, unless the first tile had none of its keys
SCALE_BLOCK = gl.constexpr(128)  # tokens that share a scale


@gluon.jit
def _feed(inputs, buffers, barriers, shape, tables, loaded, turn, GROUPS: gl.constexpr, STAGES: gl.constexpr,
          COLUMNS: gl.constexpr, WIDTH: gl.constexpr, PACK: gl.constexpr, RETRY: gl.constexpr):  # fmt: skip
    """Load what the items need, all of them or (RETRY) the flagged ones. Gives (tiles loaded so far, items so far)."""
    q, k, v = inputs
    q_tiles, k_tiles, v_tiles, _ = buffers
    q_full, q_empty, k_full, v_full, _ = barriers
    orders, retry_flags, _, group, _ = shape
    runs, counts, most_runs, _, _ = tables
    PART: gl.constexpr = 64 // PACK  # queries of a warpgroup
    step, item = next_work_tile(orders, retry_flags, 0, RETRY)
    while item[0] >= 0:
        tile, b, h = item
        place = place_of(item, tables, 0, 1)
        count = gl.load(counts + place)
        for w in gl.static_range(GROUPS):
            mbarrier.wait(q_empty.index(w), (turn & 1) ^ 1)
            mbarrier.expect(q_full.index(w), q.block_type.nbytes)
            load_tile(q, [b, (tile * GROUPS + w) * PART, h, 0], q_full.index(w), q_tiles.index(w))
        pair = h // group
        for run in range(count):
            begin = gl.load(runs + (place * most_runs + run) * 3)
            end = gl.load(runs + (place * most_runs + run) * 3 + 1)
            for index in range(begin, end):
                stage = loaded % STAGES
                claim_keys(loaded, GROUPS, STAGES)
                mbarrier.expect(k_full.index(stage), k.block_type.nbytes)
                quads = [b, 0, index * (COLUMNS // 4), 0, pair * WIDTH]
                load_tile(k, quads, k_full.index(stage), k_tiles.index(stage))
                claim_values(loaded, GROUPS, STAGES)
                mbarrier.expect(v_full.index(stage), v.block_type.nbytes)
                load_tile(v, [b, pair, 0, index * COLUMNS], v_full.index(stage), v_tiles.index(stage))
                loaded += 1
        turn += 1
        step, item = next_work_tile(orders, retry_flags, step + 1, RETRY)
    return loaded, turn


@gluon.jit
def _load(inputs, buffers, barriers, shape, tables, GROUPS: gl.constexpr, STAGES: gl.constexpr, COLUMNS: gl.constexpr,
          WIDTH: gl.constexpr, PACK: gl.constexpr, LAZY: gl.constexpr):  # fmt: skip
    """The loading warp."""
    nothing = gl.to_tensor(0)
    loaded, turn = _feed(inputs, buffers, barriers, shape, tables, nothing, nothing, GROUPS, STAGES, COLUMNS, WIDTH,
                         PACK, False)  # fmt: skip
    if LAZY:
        flagged = any_flagged(shape[1], barriers[4])
        if flagged:
            loaded, turn = _feed(inputs, buffers, barriers, shape, tables, loaded, turn, GROUPS, STAGES, COLUMNS, WIDTH,
                                 PACK, True)  # fmt: skip
    claim_all(loaded, GROUPS, STAGES)


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
def _powers(s, factor, shift, POLYNOMIAL: gl.constexpr):
    """[64, COLUMNS] weights, 2^(s factor + shift)."""
    if POLYNOMIAL == 0:
        p = gl.exp2(s * factor[:, None] + shift[:, None])
    else:
        numbers = [s, factor[:, None], shift[:, None], (factor / 254)[:, None], ((shift + 127) / 254)[:, None]]
        p = gl.inline_asm_elementwise(
            POWERS[POLYNOMIAL], POWERS_OPERANDS, numbers, dtype=gl.float32, is_pure=True, pack=8
        )  # fmt: skip
    return p


@gluon.jit
def _above(s, top, factor, COLUMNS: gl.constexpr, SCORES: gl.constexpr):
    """(what older weights are multiplied by, what is subtracted from scores, the new top), in powers of two."""
    higher = gl.maximum(top, largest(s, COLUMNS, SCORES) * factor)
    base = gl.where(higher == float("-inf"), 0.0, higher)
    return gl.exp2(top - base), base, higher


@gluon.jit
def _lifted(sums, shift, SCORES: gl.constexpr):
    """(what weights are multiplied by, what is added to later scores): as before, unless a sum of weights, and so
    perhaps a weight, is more than e4m3 can hold."""
    highest = gl.convert_layout(gl.max(sums, 1), gl.SliceLayout(1, SCORES))  # [64]
    exponent = (highest.to(gl.int32, bitcast=True) >> 23) - 127
    lift = gl.where(highest > MOST_E4M3, exponent - LIFTED, 0)
    rescale = ((127 - lift) << 23).to(gl.float32, bitcast=True)  # 2^-lift
    # A sum far beyond that may have overflowed: it flags the row's item.
    return gl.where(lift < FARTHEST, rescale, float("nan")), shift - lift.to(gl.float32)


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
def _pass_over(pipeline, used, count, GROUPS: gl.constexpr, STAGES: gl.constexpr):
    """Hand back tiles that only the other warpgroups need."""
    skip(pipeline, (used % STAGES, (used // STAGES) & 1), count, GROUPS, STAGES)
    return used + count


@gluon.jit
def _walk(query_tile, k_tiles, v_tiles, barriers, q_empty, used, own, state, b, h, query, factor, scales, numbers,
          mask_tables, w: gl.constexpr, MASK: gl.constexpr, CAP: gl.constexpr, EARLY: gl.constexpr,
          BLOCKED: gl.constexpr, POLYNOMIAL: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
          COLUMNS: gl.constexpr, WIDTH: gl.constexpr, LAZY: gl.constexpr, SCORES: gl.constexpr,
          OUTPUT: gl.constexpr):  # fmt: skip
    """(output, top, total, scale of the output) of 64 rows over `own` > 0 key tiles; `factor` [64] lacks k's scale."""
    k_full, v_full = barriers
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
    return_keys(stage, GROUPS, STAGES)
    s = _scores(s, whole, index, masked, b, h, query, numbers, mask_tables, MASK, CAP, EARLY, COLUMNS, SCORES)
    top = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))  # in powers of two
    one = gl.full([64], 1.0, gl.float32, gl.SliceLayout(1, SCORES))
    if READY:
        _, base, top = _above(s, top, one, COLUMNS, SCORES)
    else:
        _, base, top = _above(s, top, whole, COLUMNS, SCORES)
    shift = (ANCHOR if LAZY else HEADROOM) - base
    p = _powers(s, one if READY else whole, shift, POLYNOMIAL)
    parts = sums_of(p, COLUMNS)
    PARTS: gl.constexpr = gl.SliceLayout(1, parts.type.layout)
    output = gl.zeros([64, WIDTH], gl.float32, OUTPUT)
    ahead, ahead_phase = after((stage, phase), STAGES)
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
            v_stage = stage
            v_phase = phase
            stage = ahead
            phase = ahead_phase
            ahead, ahead_phase = after((stage, phase), STAGES)
            if BLOCKED:
                block = index * COLUMNS // SCALE_BLOCK
                whole = factor * gl.load(k_scale + block * k_step)
                unit_before = unit
                unit = gl.load(v_scale + block * v_step)
            weight = _operand(p, COLUMNS, OPERAND)  # here, since bytes carried around the loop take a register each
            keys_tile = k_tiles.index(stage).reshape([COLUMNS, WIDTH])
            s_later = warpgroup_mma(query_tile, keys_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(v_stage), v_phase)
            values_tile = v_tiles.index(v_stage).reshape([WIDTH, COLUMNS]).permute((1, 0))
            output_later = warpgroup_mma(weight, values_tile, output, is_async=True)
            s = warpgroup_mma_wait(1, deps=[s_later])
            s = _scores(s, whole, index, masked, b, h, query, numbers, mask_tables, MASK, CAP, EARLY, COLUMNS, SCORES)
            if LAZY:
                p = _powers(s, one if READY else whole, shift, POLYNOMIAL)
                sums = sums_of(p, COLUMNS)
                lifted, shift = _lifted(sums, shift, SCORES)
                parts = (parts + sums) * gl.convert_layout(lifted, PARTS)[:, None]
                rescale = lifted
            else:
                rescale, base, top = _above(s, top, one if READY else whole, COLUMNS, SCORES)
                p = _powers(s, one if READY else whole, HEADROOM - base, POLYNOMIAL)
                parts = parts * gl.convert_layout(rescale, PARTS)[:, None] + sums_of(p, COLUMNS)
            if BLOCKED:
                rescale = rescale * (unit_before / unit)
            # The next keys are awaited here and not when they are needed: ptxas moves the wait for the product up to
            # the last branch, and without this one the product would be over before the exponentials begin.
            mbarrier.wait(k_full.index(ahead), ahead_phase, pred=left > 1)
            output = warpgroup_mma_wait(0, deps=[output_later])
            return_keys(stage, GROUPS, STAGES)
            return_values(v_stage, GROUPS, STAGES)
            output = _rescaled(output, rescale, WIDTH, OUTPUT)
            if LAZY:
                p = _rescaled(p, lifted, COLUMNS, SCORES)
            left -= 1
        first = end
    mbarrier.arrive(q_empty, count=1)
    mbarrier.wait(v_full.index(stage), phase)
    weight = _operand(p, COLUMNS, OPERAND)
    values_tile = v_tiles.index(stage).reshape([WIDTH, COLUMNS]).permute((1, 0))
    output_later = warpgroup_mma(weight, values_tile, output, is_async=True)
    output = warpgroup_mma_wait(0, deps=[output_later])
    return_values(stage, GROUPS, STAGES)
    total = gl.convert_layout(gl.sum(parts, 1), gl.SliceLayout(1, SCORES))
    if LAZY:
        top = HEADROOM - shift
    return output, top, total, unit


@gluon.jit
def _items(outputs, buffers, barriers, shape, tables, scales, numbers, scale, sinks, mask_tables, used, turn,
           w: gl.constexpr, MASK: gl.constexpr, CAP: gl.constexpr, EARLY: gl.constexpr, HAS_SINKS: gl.constexpr,
           BLOCKED: gl.constexpr, POLYNOMIAL: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
           COLUMNS: gl.constexpr, WIDTH: gl.constexpr, PACK: gl.constexpr, LAZY: gl.constexpr,
           RETRY: gl.constexpr):  # fmt: skip
    """Warpgroup `w`: 64 rows of all items, or (RETRY) of the flagged ones. Gives (tiles used so far, which say the
    stage and the phase; items so far)."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    PART: gl.constexpr = 64 // PACK
    o, lse = outputs
    q_tiles, k_tiles, v_tiles, o_tiles = buffers
    q_full, q_empty, k_full, v_full, _ = barriers
    orders, retry_flags, heads, group, queries = shape
    runs, plans, most_runs, _, _ = tables
    q_scale, k_scale, v_scale, q_blocks, k_blocks, v_blocks, q_step, k_step, v_step = scales
    pipeline = (k_full, v_full)
    row = gl.arange(0, 64, gl.SliceLayout(1, SCORES))
    query_tile = q_tiles.index(w).reshape([64, WIDTH])
    output_tile = o_tiles.index(w).reshape([64, WIDTH])
    step, item = next_work_tile(orders, retry_flags, 0, RETRY)
    while item[0] >= 0:
        tile, b, h = item
        place = place_of(item, tables, w, GROUPS)
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
        used = _pass_over(pipeline, used, lead, GROUPS, STAGES)
        mbarrier.wait(q_full.index(w), turn & 1)
        if own > 0:
            output, top, total, unit = _walk(
                query_tile, k_tiles, v_tiles, pipeline, q_empty.index(w), used, own, (first, index, end, masked),
                b, h, query, factor, (k_scale + pair * k_blocks, v_scale + pair * v_blocks, k_step, v_step), numbers,
                mask_tables, w, MASK, CAP, EARLY, BLOCKED, POLYNOMIAL, GROUPS, STAGES, COLUMNS, WIDTH, LAZY,
                SCORES, OUTPUT,
            )  # fmt: skip
        else:
            mbarrier.arrive(q_empty.index(w), count=1)
            output = gl.zeros([64, WIDTH], gl.float32, OUTPUT)
            top = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
            total = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))
            unit = gl.load(v_scale)  # of nothing
        used = _pass_over(pipeline, used + own, trail, GROUPS, STAGES)
        if LAZY:
            flag(retry_flags, step, total, (query < queries) & (own > 0), LEAST, MOST)
        if HAS_SINKS:  # one more column, in the denominator only
            sink = gl.load(sinks + head).to(gl.float32) * LOG2E
            rescale, extra, top = merge_row_max(top, sink)
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
        turn += 1
        step, item = next_work_tile(orders, retry_flags, step + 1, RETRY)
    return used, turn


@gluon.jit
def _consume(outputs, buffers, barriers, shape, tables, scales, numbers, scale, sinks, mask_tables, w: gl.constexpr,
             MASK: gl.constexpr, CAP: gl.constexpr, EARLY: gl.constexpr, HAS_SINKS: gl.constexpr,
             BLOCKED: gl.constexpr, POLYNOMIAL: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
             COLUMNS: gl.constexpr, WIDTH: gl.constexpr, PACK: gl.constexpr, LAZY: gl.constexpr):  # fmt: skip
    """Warpgroup `w`: all items, and then the flagged ones again."""
    nothing = gl.to_tensor(0)
    used, turn = _items(
        outputs, buffers, barriers, shape, tables, scales, numbers, scale, sinks, mask_tables, nothing, nothing, w,
        MASK, CAP, EARLY, HAS_SINKS, BLOCKED, POLYNOMIAL, GROUPS, STAGES, COLUMNS, WIDTH, PACK, LAZY, False,
    )  # fmt: skip
    if LAZY:
        stores_done(barriers[4])
        flagged = any_flagged(shape[1], barriers[4])
        if flagged:
            _items(
                outputs, buffers, barriers, shape, tables, scales, numbers, scale, sinks, mask_tables, used, turn, w,
                MASK, CAP, EARLY, HAS_SINKS, BLOCKED, POLYNOMIAL, GROUPS, STAGES, COLUMNS, WIDTH, PACK, False, True,
            )  # fmt: skip
    tma.store_wait(0)


# Whether these are multiples of 16 makes no difference here, and would only compile the kernel again.
_SIZES = (
    "most_items", "most_runs", "most_loads", "by_batch", "by_head", "heads", "queries", "keys",
    "q_blocks", "k_blocks", "v_blocks",
)  # fmt: skip


@gluon.jit(do_not_specialize_on_alignment=_SIZES)
def attention_forward_fp8(
    lse, q, k, v, o, sinks, q_scale, k_scale, v_scale, retry_flags, mask_tables, runs, plans, loads, counts, orders,
    most_items, most_runs, most_loads, by_batch, by_head, heads, group, queries, keys, q_blocks, k_blocks, v_blocks,
    scale, softcap,
    MASK: gl.constexpr, CAP: gl.constexpr, EARLY: gl.constexpr, HAS_SINKS: gl.constexpr, Q_STEP: gl.constexpr,
    K_STEP: gl.constexpr, V_STEP: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, COLUMNS: gl.constexpr,
    WIDTH: gl.constexpr, PACK: gl.constexpr, LAZY: gl.constexpr, POLYNOMIAL: gl.constexpr, REGISTERS: gl.constexpr,
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
    v_full = new_barriers(STAGES, 1)
    done = new_barriers(1, GROUPS)
    if LAZY:
        retry_flags += gl.program_id(0) * most_items
        clear(retry_flags, most_items)
    synchronize()  # else the compiler does so in the first warpgroup's loops, since these are what they wait for
    barriers = (q_full, q_empty, k_full, v_full, done)
    inputs, outputs = (q, k, v), (o, lse)
    buffers = (q_tiles, k_tiles, v_tiles, o_tiles)
    shape = (orders + gl.program_id(0) * most_items * 3, retry_flags, heads, group, queries)
    tables = (runs, plans, most_runs, by_batch, by_head)
    sources = (loads, counts, most_loads, by_batch, by_head)
    scales = (q_scale, k_scale, v_scale, q_blocks, k_blocks, v_blocks, Q_STEP, K_STEP, V_STEP)
    numbers = (queries, keys, softcap)
    if GROUPS == 2:
        gl.warp_specialize([
            (_consume, (outputs, buffers, barriers, shape, tables, scales, numbers, scale, sinks, mask_tables, 0,
                        MASK, CAP, EARLY, HAS_SINKS, BLOCKED, POLYNOMIAL, GROUPS, STAGES, COLUMNS, WIDTH, PACK, LAZY)),
            (_consume, (outputs, buffers, barriers, shape, tables, scales, numbers, scale, sinks, mask_tables, 1,
                        MASK, CAP, EARLY, HAS_SINKS, BLOCKED, POLYNOMIAL, GROUPS, STAGES, COLUMNS, WIDTH, PACK, LAZY)),
            (_load, (inputs, buffers, barriers, shape, sources, GROUPS, STAGES, COLUMNS, WIDTH, PACK, LAZY)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (outputs, buffers, barriers, shape, tables, scales, numbers, scale, sinks, mask_tables, 0,
                        MASK, CAP, EARLY, HAS_SINKS, BLOCKED, POLYNOMIAL, GROUPS, STAGES, COLUMNS, WIDTH, PACK, LAZY)),
            (_consume, (outputs, buffers, barriers, shape, tables, scales, numbers, scale, sinks, mask_tables, 1,
                        MASK, CAP, EARLY, HAS_SINKS, BLOCKED, POLYNOMIAL, GROUPS, STAGES, COLUMNS, WIDTH, PACK, LAZY)),
            (_consume, (outputs, buffers, barriers, shape, tables, scales, numbers, scale, sinks, mask_tables, 2,
                        MASK, CAP, EARLY, HAS_SINKS, BLOCKED, POLYNOMIAL, GROUPS, STAGES, COLUMNS, WIDTH, PACK, LAZY)),
            (_load, (inputs, buffers, barriers, shape, sources, GROUPS, STAGES, COLUMNS, WIDTH, PACK, LAZY)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip
