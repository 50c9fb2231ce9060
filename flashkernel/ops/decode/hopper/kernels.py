"""Decoding on Hopper: two warps do nothing but ask for tiles of keys and values, four multiply what has come.

A program's share of the line of tiles, its parts and how they are added up are those of the portable kernel
(triton/plan.py, triton/kernels.py). What differs is how a tile travels: as boxes of a tensor descriptor, straight into
a ring in shared memory that holds as much as a multiprocessor has room for. The loading warps wait for nothing but
free places in it, and go on into the next unit while this one is still being multiplied.

A matrix product takes 64 rows. A unit's rows, (query, head of the group) pairs, are the first of them; nothing waits
for the arithmetic that the others waste.
"""

from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashkernel.blocks.softmax_triton import LN2, LOG2E, merge_row_max, tanh
from flashkernel.core.gluon import (
    fence_async_shared,
    gl,
    gluon,
    load_tile,
    mbarrier,
    new_barriers,
    reinterpret,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashkernel.ops.decode.triton.plan import counts_of, first_of, span, whole_units


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _share(lengths, batch, capacity, queries, window, sink_tokens, units, WINDOWED: gl.constexpr, KEYS: gl.constexpr,
           BATCH: gl.constexpr):  # fmt: skip
    """(origin, end, sequence, into): the program's places of the line, and where among the sequences they begin."""
    # Up to 8 lengths a thread, every warp holds all of them: sums need no other warp.
    EACH: gl.constexpr = 1 if BATCH <= 32 else BATCH // 32 if BATCH <= 256 else 8
    sequence = gl.arange(0, BATCH, gl.BlockedLayout([EACH], [32], [4], [0]))
    counts = counts_of(
        sequence, lengths, batch, capacity, queries, 0, window, sink_tokens, units, WINDOWED, KEYS
    )  # fmt: skip
    program, programs = gl.program_id(0), gl.num_programs(0)
    ends = gl.associative_scan(counts, 0, _add)
    line = gl.sum(counts, 0)
    if whole_units(counts, line, units, batch, programs, False):
        mine = program // units
        share = gl.sum(gl.where(sequence == mine, counts, 0), 0) // units  # none for programs past the last unit
        origin = gl.sum(gl.where(sequence < mine, counts, 0), 0) + program % units * share
        end = origin + share
    else:
        origin, end = first_of(program, line, programs), first_of(program + 1, line, programs)
    past = ends <= origin  # the sequences that lie before
    return origin, end, gl.sum(past.to(gl.int32), 0), origin - gl.sum(gl.where(past, counts, 0), 0)


@gluon.jit
def _unit(lengths, b, into, left, sizes, WINDOWED: gl.constexpr, KEYS: gl.constexpr):
    """(head, first, last, each, until, length, front, skip, alive) of the unit that a place lies in.

    The unit has `each` places, of which this program takes [first, last); those before `until` hold keys.
    """
    queries, capacity, window, sink_tokens = sizes
    length = gl.minimum(gl.maximum(gl.load(lengths + b), 0), capacity).to(gl.int32)
    front, skip, tiles, alive = span(length, queries, 0, window, sink_tokens, WINDOWED, KEYS)
    each = gl.maximum(tiles, 1)
    head = into // each
    first = into - head * each
    last = gl.minimum(each, first + left)
    return head, first, last, each, gl.minimum(last, tiles), length, front, skip, alive


@gluon.jit
def _begin(index, front, skip, WINDOWED: gl.constexpr, KEYS: gl.constexpr):
    """The first key of a unit's tile."""
    if WINDOWED:
        index += gl.where(index < front, 0, skip)
    return index * KEYS


@gluon.jit
def _numbers(table, begin, length, alive, sink_tokens, WINDOWED: gl.constexpr, PAGE: gl.constexpr,
             PAGES: gl.constexpr):  # fmt: skip
    """The numbers of a tile's pages; where one of several holds no key that is seen, the last key's is taken."""
    numbers = ()
    for page in gl.static_range(PAGES):
        here = begin + page * PAGE
        if PAGES > 1:
            dead = here >= length
            if WINDOWED:
                dead = dead | ((here + PAGE <= alive) & (here >= sink_tokens))
            here = gl.where(dead, length - 1, here)
        numbers = numbers + (gl.load(table + here // PAGE),)  # type: ignore[assignment]
    return numbers


@gluon.jit
def _load(x, tiles, full, empty, lengths, table, share, sizes, units, table_row, WINDOWED: gl.constexpr,
          PAGE: gl.constexpr, PAGES: gl.constexpr, PANELS: gl.constexpr, KEYS: gl.constexpr,
          STAGES: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """A loading warp: the share's tiles of keys, or of values, one box for each page and 64 columns."""
    if PDL:
        gdc_wait()  # what it copies may be what the kernel before has written
    origin, end, b, into = share
    _, _, _, sink_tokens = sizes
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    place = origin
    while place < end:
        head, first, last, each, until, length, front, skip, alive = _unit(
            lengths, b, into, end - place, sizes, WINDOWED, KEYS
        )  # fmt: skip
        begin = _begin(first, front, skip, WINDOWED, KEYS)
        index = first
        if PAGE > 0:
            pages = table + b.to(gl.int64) * table_row
            numbers = _numbers(pages, begin, gl.maximum(length, 1), alive, sink_tokens, WINDOWED, PAGE, PAGES)
        while index < until:
            if PAGE > 0:  # the next tile's are asked for now: by then they have come
                following = _begin(gl.minimum(index + 1, until - 1), front, skip, WINDOWED, KEYS)
                later = _numbers(pages, following, length, alive, sink_tokens, WINDOWED, PAGE, PAGES)
            mbarrier.wait(empty.index(stage), phase ^ 1)
            mbarrier.expect(full.index(stage), PAGES * PANELS * x.block_type.nbytes)
            for page in gl.static_range(PAGES):
                for panel in gl.static_range(PANELS):
                    box = tiles.index((stage * PANELS + panel) * PAGES + page)
                    if PAGE > 0:
                        slot = begin % PAGE if PAGE > KEYS else 0
                        load_tile(x, [numbers[page], slot, head, panel * 64], full.index(stage), box)
                    else:
                        load_tile(x, [b, begin, head, panel * 64], full.index(stage), box)
            index += 1
            if PAGE > 0:
                begin, numbers = following, later
            else:
                begin = _begin(index, front, skip, WINDOWED, KEYS)
            stage += 1
            phase ^= (stage == STAGES).to(gl.int32)
            stage = gl.where(stage == STAGES, 0, stage)
        place += last - first
        into += last - first
        if into == each * units:
            b += 1
            into = 0


@gluon.jit
def _rows(q, q_new, q_head, queries, group, WIDTH: gl.constexpr, BLOCK: gl.constexpr, LEFT: gl.constexpr):
    """[64, BLOCK] of a unit's (query, head) rows, in the registers that products take them from."""
    row = gl.arange(0, 64, gl.SliceLayout(1, LEFT))[:, None]
    column = gl.arange(0, BLOCK, gl.SliceLayout(0, LEFT))[None, :]
    exists = row < queries * group
    if WIDTH < BLOCK:
        exists = exists & (column < WIDTH)
    return gl.load(q + (row // group * q_new + row % group * q_head) + column, mask=exists, other=0.0)


@gluon.jit
def _scores(s, begin, seen_by_all, from_all, limit, low, sink_tokens, scale, softcap, WINDOWED: gl.constexpr,
            CAP: gl.constexpr, KEYS: gl.constexpr, SCORES: gl.constexpr):  # fmt: skip
    """[64, KEYS] products as they go into the softmax, in powers of two; `limit` and `low` bound each row's keys."""
    if CAP:
        s = (softcap * LOG2E) * tanh(s * (scale / softcap))
    else:
        s = s * (scale * LOG2E)
    if (begin + KEYS > seen_by_all) | (begin < from_all):
        key = begin + gl.arange(0, KEYS, gl.SliceLayout(0, SCORES))[None, :]
        seen = key < limit[:, None]
        if WINDOWED:
            seen = seen & ((key >= low[:, None]) | (key < sink_tokens))
        s = gl.where(seen, s, float("-inf"))
    return s


@gluon.jit
def _clear(panels, stage, begin, length, alive, sink_tokens, WINDOWED: gl.constexpr, KEYS: gl.constexpr,
           PANELS: gl.constexpr):  # fmt: skip
    """Zeros where a tile of values has none: what was never written may be NaN, which no weight of zero removes."""
    SIZE: gl.constexpr = 64 if KEYS > 64 else KEYS
    PARTS: gl.constexpr = KEYS // SIZE
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    for part in gl.static_range(PARTS):
        position = begin + part * SIZE + gl.arange(0, SIZE, gl.SliceLayout(1, WIDE))
        live = position < length
        if WINDOWED:
            live = live & ((position >= alive) | (position < sink_tokens))
        for panel in gl.static_range(PANELS):
            piece = panels.index((stage * PANELS + panel) * PARTS + part)
            values = piece.load(WIDE)  # [SIZE, 64]
            piece.store(gl.where(live[:, None], values, gl.zeros_like(values)))
    fence_async_shared()  # the product reads past the path on which this was written


@gluon.jit
def _finish(output, total, top, b, query, head, inside, outputs, sinks, queries, heads, HAS_SINKS: gl.constexpr,
            WIDTH: gl.constexpr, BLOCK: gl.constexpr, OUTPUT: gl.constexpr):  # fmt: skip
    """Normalise rows and write them: output [64, BLOCK], and the logarithms of their sums."""
    o, lse = outputs
    if HAS_SINKS:  # one more column, in the denominator only
        sink = gl.load(sinks + head, mask=inside, other=0.0).to(gl.float32) * LOG2E
        rescale, extra, top = merge_row_max(top, sink)
        total = total * rescale + extra
        share = gl.where(total == 0.0, 0.0, rescale / total)
    else:
        share = gl.where(total == 0.0, 0.0, 1.0 / total)
    log_sum = gl.where(total == 0.0, float("-inf"), (top + gl.log2(total)) * LN2)
    gl.store(lse + (b.to(gl.int64) * heads + head) * queries + query, log_sum, mask=inside)
    row = (b.to(gl.int64) * queries + query) * heads + head
    _write(output * gl.convert_layout(share, gl.SliceLayout(1, OUTPUT))[:, None], row, inside, o, WIDTH, WIDTH, BLOCK,
           OUTPUT)  # fmt: skip


@gluon.jit
def _write(output, row, inside, target, stride: gl.constexpr, WIDTH: gl.constexpr, BLOCK: gl.constexpr,
           OUTPUT: gl.constexpr):  # fmt: skip
    """Rows of [64, BLOCK] to target[row], as far as they exist."""
    row = gl.convert_layout(row, gl.SliceLayout(1, OUTPUT))[:, None]
    mask = gl.convert_layout(inside, gl.SliceLayout(1, OUTPUT))[:, None]
    column = gl.arange(0, BLOCK, gl.SliceLayout(0, OUTPUT))[None, :]
    if WIDTH < BLOCK:
        mask = mask & (column < WIDTH)
    gl.store(target + row * stride + column, output, mask=mask)


@gluon.jit
def _attend(inputs, outputs, parts, buffers, barriers, share, sizes, shape, sinks, scale, softcap,
            WINDOWED: gl.constexpr, CAP: gl.constexpr, HAS_SINKS: gl.constexpr, WIDTH: gl.constexpr,
            BLOCK: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """The multiplying warps: each unit's rows over the tiles that the share holds of it."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    WEIGHT: gl.constexpr = gl.DotOperandLayout(0, OUTPUT, 2)
    q, lengths, q_batch, q_new, q_head = inputs
    partial, stats = parts
    k_tiles, v_tiles, v_panels = buffers
    k_full, k_empty, v_full, v_empty = barriers
    origin, end, b, into = share
    queries, _, window, sink_tokens = sizes
    units, heads, group = shape
    row = gl.arange(0, 64, gl.SliceLayout(1, SCORES))
    query, inside = row // group, row < queries * group  # [64]
    nothing = gl.zeros([64, KEYS], gl.float32, SCORES)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    place = origin
    while place < end:
        pair, first, last, each, until, length, front, skip, alive = _unit(
            lengths, b, into, end - place, sizes, WINDOWED, KEYS
        )  # fmt: skip
        head = pair * group + row % group
        q_tile = _rows(q + b.to(gl.int64) * q_batch + pair * group * q_head, q_new, q_head, queries, group, WIDTH,
                       BLOCK, LEFT)  # fmt: skip
        limit = length - queries + query + 1  # [64]
        output = gl.zeros([64, BLOCK], gl.float32, OUTPUT)
        total = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))
        top = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        index = first
        while index < until:
            begin = _begin(index, front, skip, WINDOWED, KEYS)
            mbarrier.wait(k_full.index(stage), phase)
            s = warpgroup_mma(q_tile, k_tiles.index(stage).permute((1, 0)), nothing, use_acc=False,
                              is_async=True)  # fmt: skip
            s = warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(k_empty.index(stage), count=1)
            s = _scores(s, begin, length - queries + 1, length - window if WINDOWED else 0, limit, limit - window,
                        sink_tokens, scale, softcap, WINDOWED, CAP, KEYS, SCORES)  # fmt: skip
            higher = gl.maximum(top, gl.max(s, 1))
            anchor = gl.where(higher == float("-inf"), 0.0, higher)
            rescale = gl.exp2(top - anchor)
            weight = gl.exp2(s - anchor[:, None])  # [64, KEYS]
            total = total * rescale + gl.sum(weight, 1)
            top = higher
            output = output * gl.convert_layout(rescale, gl.SliceLayout(1, OUTPUT))[:, None]
            mbarrier.wait(v_full.index(stage), phase)
            if (begin + KEYS > length) | (WINDOWED & (begin < alive)):
                _clear(v_panels, stage, begin, length, alive, sink_tokens, WINDOWED, KEYS, BLOCK // 64)
            weight = gl.convert_layout(weight.to(v_tiles.dtype), WEIGHT)
            output = warpgroup_mma(weight, v_tiles.index(stage), output, is_async=True)
            output = warpgroup_mma_wait(0, deps=[output])
            mbarrier.arrive(v_empty.index(stage), count=1)
            index += 1
            stage += 1
            phase ^= (stage == STAGES).to(gl.int32)
            stage = gl.where(stage == STAGES, 0, stage)
        if (first == 0) & (last == each):
            _finish(output, total, top, b, query, head, inside, outputs, sinks, queries, heads, HAS_SINKS, WIDTH,
                    BLOCK, OUTPUT)  # fmt: skip
        else:
            slot = 2 * gl.program_id(0) + (place != origin).to(gl.int32)
            _write(output, slot * ROWS + row, inside, partial, BLOCK, BLOCK, BLOCK, OUTPUT)
            gl.store(stats + slot * 2 * ROWS + row, top, mask=inside)
            gl.store(stats + (slot * 2 + 1) * ROWS + row, total, mask=inside)
        place += last - first
        into += last - first
        if into == each * units:
            b += 1
            into = 0


# Whether these are multiples of 16 makes no difference here, and would only compile the kernel again.
_SIZES = ("batch", "capacity", "heads", "window", "sink_tokens", "table_row")


@gluon.jit(do_not_specialize_on_alignment=_SIZES)
def decode_stream(
    q, k, v, lengths, table, sinks, o, lse, partial, stats, q_batch, q_new, q_head, table_row,
    batch, queries, heads, group, units, capacity, window, sink_tokens, scale, softcap,
    WINDOWED: gl.constexpr, CAP: gl.constexpr, HAS_SINKS: gl.constexpr, PAGE: gl.constexpr, WIDTH: gl.constexpr,
    BLOCK: gl.constexpr, BATCH: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    HEIGHT: gl.constexpr = KEYS if PAGE == 0 or PAGE > KEYS else PAGE  # of a box
    PAGES: gl.constexpr = KEYS // HEIGHT
    PANELS: gl.constexpr = BLOCK // 64
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, BLOCK], k.dtype)
    k_tiles = gl.allocate_shared_memory(k.dtype, [STAGES, KEYS, BLOCK], TILE)
    v_tiles = gl.allocate_shared_memory(v.dtype, [STAGES, KEYS, BLOCK], TILE)
    # The same bytes as the copies see them: 64 columns side by side, row below row, page below page.
    k_boxes = reinterpret(k_tiles, k.dtype, [STAGES * PANELS * PAGES, 1, HEIGHT, 1, 64], k.layout)
    v_boxes = reinterpret(v_tiles, v.dtype, [STAGES * PANELS * PAGES, 1, HEIGHT, 1, 64], v.layout)
    SIZE: gl.constexpr = 64 if KEYS > 64 else KEYS
    v_panels = reinterpret(v_tiles, v.dtype, [STAGES * PANELS * (KEYS // SIZE), SIZE, 64], TILE)
    k_full = new_barriers(STAGES, 1)
    k_empty = new_barriers(STAGES, 1)
    v_full = new_barriers(STAGES, 1)
    v_empty = new_barriers(STAGES, 1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()  # the combine kernel may become resident; it waits for our results
    share = _share(lengths, batch, capacity, queries, window, sink_tokens, units, WINDOWED, KEYS, BATCH)
    sizes = (queries, capacity, window, sink_tokens)
    gl.warp_specialize([
        (_attend, ((q, lengths, q_batch, q_new, q_head), (o, lse), (partial, stats), (k_tiles, v_tiles, v_panels),
                   (k_full, k_empty, v_full, v_empty), share, sizes, (units, heads, group), sinks, scale, softcap,
                   WINDOWED, CAP, HAS_SINKS, WIDTH, BLOCK, ROWS, KEYS, STAGES)),
        (_load, (k, k_boxes, k_full, k_empty, lengths, table, share, sizes, units, table_row, WINDOWED, PAGE, PAGES,
                 PANELS, KEYS, STAGES, PDL)),
        (_load, (v, v_boxes, v_full, v_empty, lengths, table, share, sizes, units, table_row, WINDOWED, PAGE, PAGES,
                 PANELS, KEYS, STAGES, PDL)),
    ], [1, 1], [REGISTERS, REGISTERS])  # fmt: skip
