"""Split-KV decoding on Hopper: two producer warps load K and V by TMA, a consumer warpgroup multiplies them.

The split schedule, the partials and the combine step are those of the Triton kernel (split_schedule.py,
triton/split_kv.py). What differs is how a tile is loaded: as TMA boxes, straight into a pipeline that takes all the
shared memory there is. The producers wait for free stages only, and run ahead into the next work tile.

A warpgroup MMA has 64 rows. A work tile's rows, (query, head of the group), are the first of them. The products of the
other rows are not used; the kernel is bound by memory.
"""

from typing import Any, NamedTuple

from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashkernel.blocks.pipeline_gluon import PipelineState
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
from flashkernel.ops.decode.kernel_args import Sizes, Window
from flashkernel.ops.decode.split_schedule import blocks_per_sequence, k_block_range, program_range


class Cursor(NamedTuple):
    """Where a warp is in its program's range [block, end): in which sequence, and how many blocks into it."""

    block: Any
    end: Any
    sequence: Any
    into: Any


class WorkTile(NamedTuple):
    """The part of a work tile that a program takes: K blocks [begin, end) of `blocks`, with keys below `key_end`."""

    kv_head: Any
    begin: Any
    end: Any
    key_end: Any
    blocks: Any
    seqlen: Any
    visible: Any  # KBlockRange


class Pipeline(NamedTuple):
    """Stages of K or V tiles in shared memory, and their full and empty barriers."""

    tiles: Any
    full: Any
    empty: Any


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _first_block(cache_seqlens, sizes, window, CONFIG: gl.constexpr):
    """The cursor at the beginning of the program's range. CONFIG is a `ScheduleConfig`."""
    BATCH: gl.constexpr = CONFIG.BATCH
    # Up to 8 lengths a thread, every warp holds all of them: sums need no other warp.
    EACH: gl.constexpr = 1 if BATCH <= 32 else BATCH // 32 if BATCH <= 256 else 8
    sequence = gl.arange(0, BATCH, gl.BlockedLayout([EACH], [32], [4], [0]))
    blocks = blocks_per_sequence(
        sequence, cache_seqlens, sizes.batch, sizes.capacity, sizes.seqlen_q, 0, window, sizes.head_groups,
        CONFIG.WINDOWED, CONFIG.BLOCK_N,
    )  # fmt: skip
    ends = gl.associative_scan(blocks, 0, _add)
    begin, end = program_range(
        sequence, blocks, sizes.head_groups, sizes.batch, gl.program_id(0), gl.num_programs(0)
    )  # fmt: skip
    before = ends <= begin  # the sequences that lie before it
    return Cursor(begin, end, gl.sum(before.to(gl.int32), 0), begin - gl.sum(gl.where(before, blocks, 0), 0))


@gluon.jit
def _work_tile(cache_seqlens, cursor, sizes, window, CONFIG: gl.constexpr):
    """The work tile at the cursor."""
    seqlen = gl.load(cache_seqlens + cursor.sequence)
    seqlen = gl.minimum(gl.maximum(seqlen, 0), sizes.capacity).to(gl.int32)
    visible = k_block_range(seqlen, sizes.seqlen_q, 0, window, CONFIG.WINDOWED, CONFIG.BLOCK_N)
    blocks = gl.maximum(visible.count, 1)
    kv_head = cursor.into // blocks
    begin = cursor.into - kv_head * blocks
    end = gl.minimum(blocks, begin + cursor.end - cursor.block)
    return WorkTile(kv_head, begin, end, gl.minimum(end, visible.count), blocks, seqlen, visible)


@gluon.jit
def _next_tile(cursor, tile, sizes):
    """The cursor behind a work tile."""
    into = cursor.into + (tile.end - tile.begin)
    last = into == tile.blocks * sizes.head_groups
    return Cursor(
        cursor.block + (tile.end - tile.begin), cursor.end, cursor.sequence + last.to(gl.int32),
        gl.where(last, 0, into),
    )  # fmt: skip


@gluon.jit
def _next_stage(state, NUM_STAGES: gl.constexpr):
    stage = state.stage + 1
    phase = state.phase ^ (stage == NUM_STAGES).to(gl.int32)
    return PipelineState(gl.where(stage == NUM_STAGES, 0, stage), phase)


@gluon.jit
def _first_key(index, visible, CONFIG: gl.constexpr):
    """The first key of a work tile's K block."""
    if CONFIG.WINDOWED:
        index += gl.where(index < visible.sink_blocks, 0, visible.skip)
    return index * CONFIG.BLOCK_N


@gluon.jit
def _page_numbers(page_table, begin, seqlen, key_min, sink_tokens, PAGES: gl.constexpr, CONFIG: gl.constexpr):
    """The numbers of a tile's pages; where one of several holds no visible key, the last key's page is taken."""
    PAGE_SIZE: gl.constexpr = CONFIG.PAGE_SIZE
    numbers = ()
    for page in gl.static_range(PAGES):
        key = begin + page * PAGE_SIZE
        if PAGES > 1:
            hidden = key >= seqlen
            if CONFIG.WINDOWED:
                hidden = hidden | ((key + PAGE_SIZE <= key_min) & (key >= sink_tokens))
            key = gl.where(hidden, seqlen - 1, key)
        numbers = numbers + (gl.load(page_table + key // PAGE_SIZE),)  # type: ignore[assignment]
    return numbers


@gluon.jit
def _producer(x, pipeline, cache_seqlens, page_table, page_table_stride, cursor, sizes, window, PAGES: gl.constexpr,
              CONFIG: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """A producer warp: loads the K or the V tiles of the program's range, one TMA box per page and 64 columns."""
    PAGE_SIZE: gl.constexpr = CONFIG.PAGE_SIZE
    PANELS: gl.constexpr = CONFIG.BLOCK_D // 64
    if PDL:
        gdc_wait()  # the kernel before may have written what is loaded
    state = PipelineState(gl.to_tensor(0), gl.to_tensor(0))
    while cursor.block < cursor.end:
        b = cursor.sequence
        tile = _work_tile(cache_seqlens, cursor, sizes, window, CONFIG)
        begin = _first_key(tile.begin, tile.visible, CONFIG)
        index = tile.begin
        if PAGE_SIZE > 0:
            row = page_table + b.to(gl.int64) * page_table_stride
            pages = _page_numbers(
                row, begin, gl.maximum(tile.seqlen, 1), tile.visible.key_min, window.sink_tokens, PAGES, CONFIG
            )  # fmt: skip
        while index < tile.key_end:
            if PAGE_SIZE > 0:  # prefetches the page numbers of the next tile
                next_begin = _first_key(gl.minimum(index + 1, tile.key_end - 1), tile.visible, CONFIG)
                next_pages = _page_numbers(
                    row, next_begin, tile.seqlen, tile.visible.key_min, window.sink_tokens, PAGES, CONFIG
                )  # fmt: skip
            mbarrier.wait(pipeline.empty.index(state.stage), state.phase ^ 1)
            full = pipeline.full.index(state.stage)
            mbarrier.expect(full, PAGES * PANELS * x.block_type.nbytes)
            for page in gl.static_range(PAGES):
                for panel in gl.static_range(PANELS):
                    box = pipeline.tiles.index((state.stage * PANELS + panel) * PAGES + page)
                    if PAGE_SIZE > 0:
                        slot = begin % PAGE_SIZE if PAGE_SIZE > CONFIG.BLOCK_N else 0
                        load_tile(x, [pages[page], slot, tile.kv_head, panel * 64], full, box)
                    else:
                        load_tile(x, [b, begin, tile.kv_head, panel * 64], full, box)
            index += 1
            if PAGE_SIZE > 0:
                begin, pages = next_begin, next_pages
            else:
                begin = _first_key(index, tile.visible, CONFIG)
            state = _next_stage(state, CONFIG.NUM_STAGES)
        cursor = _next_tile(cursor, tile, sizes)


@gluon.jit
def _load_q(q, strides, sizes, CONFIG: gl.constexpr, LAYOUT: gl.constexpr):
    """[64, BLOCK_D] of a work tile's (query, head) rows, in the registers of an MMA's first operand."""
    BLOCK_D: gl.constexpr = CONFIG.BLOCK_D
    group_size = sizes.group_size
    row = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))[:, None]
    dim = gl.arange(0, BLOCK_D, gl.SliceLayout(0, LAYOUT))[None, :]
    valid = row < sizes.seqlen_q * group_size
    if CONFIG.HEAD_DIM < BLOCK_D:
        valid = valid & (dim < CONFIG.HEAD_DIM)
    offset = row // group_size * strides.query + row % group_size * strides.head
    return gl.load(q + offset + dim, mask=valid, other=0.0)


@gluon.jit
def _scores(s, begin, tile, key_end, sizes, window, scale, softcap, CONFIG: gl.constexpr, LAYOUT: gl.constexpr):
    """S [64, BLOCK_N] in powers of two; rows see the keys below `key_end` [64], within their windows."""
    WINDOWED: gl.constexpr = CONFIG.WINDOWED
    BLOCK_N: gl.constexpr = CONFIG.BLOCK_N
    if CONFIG.SOFTCAP:
        s = (softcap * LOG2E) * tanh(s * (scale / softcap))
    else:
        s = s * (scale * LOG2E)
    # Only blocks that some row does not see whole are masked.
    full_begin = tile.seqlen - window.size if WINDOWED else 0
    if (begin + BLOCK_N > tile.seqlen - sizes.seqlen_q + 1) | (begin < full_begin):
        key = begin + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))[None, :]
        visible = key < key_end[:, None]
        if WINDOWED:
            visible = visible & ((key >= (key_end - window.size)[:, None]) | (key < window.sink_tokens))
        s = gl.where(visible, s, float("-inf"))
    return s


@gluon.jit
def _clear_values(panels, stage, begin, tile, sink_tokens, CONFIG: gl.constexpr):
    """Zeros the values of a V tile that no row sees: they may be uninitialized, and 0 * NaN is NaN."""
    BLOCK_N: gl.constexpr = CONFIG.BLOCK_N
    PANELS: gl.constexpr = CONFIG.BLOCK_D // 64
    ROWS: gl.constexpr = 64 if BLOCK_N > 64 else BLOCK_N
    PARTS: gl.constexpr = BLOCK_N // ROWS
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    for part in gl.static_range(PARTS):
        key = begin + part * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        visible = key < tile.seqlen
        if CONFIG.WINDOWED:
            visible = visible & ((key >= tile.visible.key_min) | (key < sink_tokens))
        for panel in gl.static_range(PANELS):
            memory = panels.index((stage * PANELS + panel) * PARTS + part)
            values = memory.load(LAYOUT)  # [ROWS, 64]
            memory.store(gl.where(visible[:, None], values, gl.zeros_like(values)))
    fence_async_shared()  # the MMA reads through the asynchronous proxy


@gluon.jit
def _store_output(acc, row_sum, row_max, b, query, head, valid, output, sinks, sizes, CONFIG: gl.constexpr,
                  LAYOUT: gl.constexpr):  # fmt: skip
    """Normalizes the rows of O [64, BLOCK_D] and writes them, and their LSE. CONFIG is an `OutputConfig`."""
    VALUE_DIM: gl.constexpr = CONFIG.VALUE_DIM
    if CONFIG.HAS_SINKS:  # one more column, in the denominator only
        sink = gl.load(sinks + head, mask=valid, other=0.0).to(gl.float32) * LOG2E
        rescale, sink_scale, row_max = merge_row_max(row_max, sink)
        row_sum = row_sum * rescale + sink_scale
        inverse = gl.where(row_sum == 0.0, 0.0, rescale / row_sum)
    else:
        inverse = gl.where(row_sum == 0.0, 0.0, 1.0 / row_sum)
    lse = gl.where(row_sum == 0.0, float("-inf"), (row_max + gl.log2(row_sum)) * LN2)
    gl.store(output.lse + (b.to(gl.int64) * sizes.heads + head) * sizes.seqlen_q + query, lse, mask=valid)
    row = (b.to(gl.int64) * sizes.seqlen_q + query) * sizes.heads + head
    o = acc * gl.convert_layout(inverse, gl.SliceLayout(1, LAYOUT))[:, None]
    _store_rows(o, row, valid, output.o, VALUE_DIM, VALUE_DIM, CONFIG.BLOCK_DV, LAYOUT)


@gluon.jit
def _store_rows(o, row, valid, target, STRIDE: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr,
                LAYOUT: gl.constexpr):  # fmt: skip
    """Writes the valid rows of [64, BLOCK_D] to target[row]."""
    row = gl.convert_layout(row, gl.SliceLayout(1, LAYOUT))[:, None]
    mask = gl.convert_layout(valid, gl.SliceLayout(1, LAYOUT))[:, None]
    dim = gl.arange(0, BLOCK_D, gl.SliceLayout(0, LAYOUT))[None, :]
    if HEAD_DIM < BLOCK_D:
        mask = mask & (dim < HEAD_DIM)
    gl.store(target + row * STRIDE + dim, o, mask=mask)


@gluon.jit
def _consumer(q, q_strides, k_pipeline, v_pipeline, v_panels, cache_seqlens, cursor, sizes, window, sinks, output,
              partials, scale, softcap, CONFIG: gl.constexpr, OUTPUT: gl.constexpr):  # fmt: skip
    """The consumer warpgroup: each work tile's rows over the K blocks that the program takes of it.

    CONFIG and OUTPUT are AttendConfig and OutputConfig.
    """
    WINDOWED: gl.constexpr = CONFIG.WINDOWED
    BLOCK_M: gl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: gl.constexpr = CONFIG.BLOCK_N
    BLOCK_D: gl.constexpr = CONFIG.BLOCK_D
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    Q_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, S_LAYOUT, 2)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    row = gl.arange(0, 64, gl.SliceLayout(1, S_LAYOUT))
    query, valid = row // sizes.group_size, row < sizes.seqlen_q * sizes.group_size  # [64]
    zeros = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
    state = PipelineState(gl.to_tensor(0), gl.to_tensor(0))
    first = cursor.block
    while cursor.block < cursor.end:
        b = cursor.sequence
        tile = _work_tile(cache_seqlens, cursor, sizes, window, CONFIG)
        head = tile.kv_head * sizes.group_size + row % sizes.group_size
        q_first = q + b.to(gl.int64) * q_strides.batch + tile.kv_head * sizes.group_size * q_strides.head
        q_tile = _load_q(q_first, q_strides, sizes, CONFIG, Q_LAYOUT)
        key_end = tile.seqlen - sizes.seqlen_q + query + 1  # [64]
        acc = gl.zeros([64, BLOCK_D], gl.float32, O_LAYOUT)
        row_sum = gl.zeros([64], gl.float32, gl.SliceLayout(1, S_LAYOUT))
        row_max = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
        index = tile.begin
        while index < tile.key_end:
            begin = _first_key(index, tile.visible, CONFIG)
            mbarrier.wait(k_pipeline.full.index(state.stage), state.phase)
            k = k_pipeline.tiles.index(state.stage).permute((1, 0))
            s = warpgroup_mma(q_tile, k, zeros, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(k_pipeline.empty.index(state.stage), count=1)
            s = _scores(s, begin, tile, key_end, sizes, window, scale, softcap, CONFIG, S_LAYOUT)
            new_max = gl.maximum(row_max, gl.max(s, 1))
            finite_max = gl.where(new_max == float("-inf"), 0.0, new_max)
            rescale = gl.exp2(row_max - finite_max)
            p = gl.exp2(s - finite_max[:, None])  # [64, BLOCK_N]
            row_sum = row_sum * rescale + gl.sum(p, 1)
            row_max = new_max
            acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, O_LAYOUT))[:, None]
            mbarrier.wait(v_pipeline.full.index(state.stage), state.phase)
            if (begin + BLOCK_N > tile.seqlen) | (WINDOWED & (begin < tile.visible.key_min)):
                _clear_values(v_panels, state.stage, begin, tile, window.sink_tokens, CONFIG)
            p = gl.convert_layout(p.to(v_pipeline.tiles.dtype), P_LAYOUT)
            acc = warpgroup_mma(p, v_pipeline.tiles.index(state.stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(v_pipeline.empty.index(state.stage), count=1)
            index += 1
            state = _next_stage(state, CONFIG.NUM_STAGES)
        if (tile.begin == 0) & (tile.end == tile.blocks):
            _store_output(acc, row_sum, row_max, b, query, head, valid, output, sinks, sizes, OUTPUT, O_LAYOUT)
        else:
            slot = 2 * gl.program_id(0) + (cursor.block != first).to(gl.int32)
            _store_rows(acc, slot * BLOCK_M + row, valid, partials.o, BLOCK_D, BLOCK_D, BLOCK_D, O_LAYOUT)
            gl.store(partials.stats + slot * 2 * BLOCK_M + row, row_max, mask=valid)
            gl.store(partials.stats + (slot * 2 + 1) * BLOCK_M + row, row_sum, mask=valid)
        cursor = _next_tile(cursor, tile, sizes)


# Whether these are multiples of 16 makes no difference here, and would only compile the kernel again: that is why they
# are arguments of their own, since elements of tuples are always specialized.
_SIZES = ("batch", "capacity", "heads", "window", "sink_tokens", "page_table_stride")


@gluon.jit(do_not_specialize_on_alignment=_SIZES)
def decode_split_kv_hopper(
    q, k, v, cache_seqlens, page_table, sinks, output, partials, q_strides, page_table_stride,
    batch, seqlen_q, heads, group_size, kv_heads, capacity, window, sink_tokens, scale, softcap,
    SCHEDULE: gl.constexpr, ATTEND: gl.constexpr, OUTPUT: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Attention of q to each program's K blocks; k and v are tensor descriptors of the cache.

    `output`, `partials` and `q_strides` are Output, Partials and QueryStrides; SCHEDULE, ATTEND and OUTPUT are
    ScheduleConfig, AttendConfig and OutputConfig.
    """
    PAGE_SIZE: gl.constexpr = ATTEND.PAGE_SIZE
    BLOCK_N: gl.constexpr = ATTEND.BLOCK_N
    BLOCK_D: gl.constexpr = ATTEND.BLOCK_D
    NUM_STAGES: gl.constexpr = ATTEND.NUM_STAGES
    BOX_ROWS: gl.constexpr = BLOCK_N if PAGE_SIZE == 0 or PAGE_SIZE > BLOCK_N else PAGE_SIZE
    PAGES: gl.constexpr = BLOCK_N // BOX_ROWS
    PANELS: gl.constexpr = BLOCK_D // 64
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_D], k.dtype)
    k_tiles = gl.allocate_shared_memory(k.dtype, [NUM_STAGES, BLOCK_N, BLOCK_D], TILE)
    v_tiles = gl.allocate_shared_memory(v.dtype, [NUM_STAGES, BLOCK_N, BLOCK_D], TILE)
    # The same bytes as the TMA boxes see them: panels of 64 columns, row below row, page below page.
    k_boxes = reinterpret(k_tiles, k.dtype, [NUM_STAGES * PANELS * PAGES, 1, BOX_ROWS, 1, 64], k.layout)
    v_boxes = reinterpret(v_tiles, v.dtype, [NUM_STAGES * PANELS * PAGES, 1, BOX_ROWS, 1, 64], v.layout)
    ROWS: gl.constexpr = 64 if BLOCK_N > 64 else BLOCK_N
    v_panels = reinterpret(v_tiles, v.dtype, [NUM_STAGES * PANELS * (BLOCK_N // ROWS), ROWS, 64], TILE)
    k_full = new_barriers(NUM_STAGES, 1)
    k_empty = new_barriers(NUM_STAGES, 1)
    v_full = new_barriers(NUM_STAGES, 1)
    v_empty = new_barriers(NUM_STAGES, 1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()  # the combine kernel may become resident; it waits for our results
    sizes = Sizes(batch, seqlen_q, heads, group_size, kv_heads, 1, capacity)
    visible = Window(window, sink_tokens)
    cursor = _first_block(cache_seqlens, sizes, visible, SCHEDULE)
    gl.warp_specialize([
        (_consumer, (q, q_strides, Pipeline(k_tiles, k_full, k_empty), Pipeline(v_tiles, v_full, v_empty), v_panels,
                     cache_seqlens, cursor, sizes, visible, sinks, output, partials, scale, softcap, ATTEND, OUTPUT)),
        (_producer, (k, Pipeline(k_boxes, k_full, k_empty), cache_seqlens, page_table, page_table_stride, cursor, sizes,
                     visible, PAGES, ATTEND, PDL)),
        (_producer, (v, Pipeline(v_boxes, v_full, v_empty), cache_seqlens, page_table, page_table_stride, cursor, sizes,
                     visible, PAGES, ATTEND, PDL)),
    ], [1, 1], [PRODUCER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
