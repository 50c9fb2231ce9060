"""The epilogue of the Hopper matrix product: what a consumer does with a work tile's sums in registers.

It goes through the accumulator in chunks of columns. A chunk gets its scales; the preactivation is stored or (DACT)
read; the chain is applied; fp8 outputs are divided by their scales; TMA stores the chunk from shared memory while the
next one is computed. Stream-K: sums of a tile that another program finishes are stored as they are.
"""

from typing import Any, NamedTuple

from flashkernel.blocks.epilogue_triton import apply_epilogue, block_scale, pull_back_activation, saturate_fp8
from flashkernel.blocks.pipeline_gluon import split_columns
from flashkernel.core.gluon import fence_async_shared, gl, gluon, store_tile, synchronize, tma
from flashkernel.ops.matmul.triton.store import add_bias


class ScaleStrides(NamedTuple):
    """Strides of the scales of A, and of B and up; 0 for what is the same for all."""

    a_batch: Any
    a_row: Any
    a_block: Any  # from one K block to the next (BLOCK_SCALED)
    b_batch: Any
    b_column: Any
    b_block: Any


class PartialSums(NamedTuple):
    """STREAM_K: what programs store of the tiles that others finish; else None."""

    sums: Any  # float32 [num_programs, BLOCK_M, BLOCK_N]
    flags: Any  # 1 once the sums are there, [num_programs, NUM_CONSUMERS]; 0 before


class EpilogueArgs(NamedTuple):
    """What the epilogue reads and writes beside C."""

    pointers: Any  # EpiloguePointers
    z_target: Any  # Z_TMA: TMA descriptors of what is written of z or dz; of a gate, of its two halves
    up_target: Any
    scales: Any  # Scales
    strides: Any  # EpilogueStrides
    scale_strides: Any  # ScaleStrides
    partials: Any  # PartialSums


@gluon.jit
def column_chunks(x, COUNT: gl.constexpr):
    """Returns a tuple of COUNT equal parts of x's columns."""
    if COUNT == 1:
        return (x,)
    else:
        left, right = split_columns(x)
        return column_chunks(left, COUNT // 2) + column_chunks(right, COUNT // 2)


@gluon.jit
def _chunks(acc, TRAITS: gl.constexpr):
    """Returns a tuple of the accumulators' columns, CHUNK_N each."""
    CHUNK_N: gl.constexpr = TRAITS.CHUNK_N
    chunks = column_chunks(acc[0], (TRAITS.BLOCK_N - TRAITS.SECOND_N) // CHUNK_N)
    if TRAITS.SECOND_N > 0:
        chunks = chunks + column_chunks(acc[1], TRAITS.SECOND_N // CHUNK_N)
    return chunks


@gluon.jit
def store_epilogue(acc, args, tile, w: gl.constexpr, TRAITS: gl.constexpr):
    """Stores epilogue(acc) chunk by chunk."""
    ROWS: gl.constexpr = TRAITS.ROWS
    CHUNK_N: gl.constexpr = TRAITS.CHUNK_N
    TILE_N: gl.constexpr = TRAITS.BLOCK_N // 2 if TRAITS.GATED else TRAITS.BLOCK_N  # columns of C
    COUNT: gl.constexpr = TILE_N // CHUNK_N
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK_N, 16])
    ep, m, n = args.epilogue, args.m, args.n
    scales, scale_strides = ep.scales, ep.scale_strides
    if TRAITS.PINGPONG:
        first_row = tile.row * ROWS
    else:
        first_row = (tile.row * TRAITS.NUM_CONSUMERS + w) * ROWS
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    in_rows = row < m
    if TRAITS.SCALED:
        a_scales = scales.a + tile.batch * scale_strides.a_batch + row * scale_strides.a_row
        a_scale = gl.load(a_scales, mask=in_rows, other=0.0)
        b_scales = tile.batch * scale_strides.b_batch  # and up's
    chunks = _chunks(acc, TRAITS)  # GATED: those of gate, then those of up
    PAIRS: gl.constexpr = TRAITS.PARTIALS and TRAITS.GATED
    STORES: gl.constexpr = (
        2 if PAIRS else 1 + (0 if not TRAITS.Z_TMA else 2 if TRAITS.PACKED != "" else 1)
    )  # of a chunk
    entry = tile.entry * 2 if PAIRS else tile.entry
    for chunk in gl.static_range(COUNT):
        first_column = tile.column * TILE_N + chunk * CHUNK_N
        column = first_column + gl.arange(0, CHUNK_N, gl.SliceLayout(0, LAYOUT))
        in_columns = column < n
        value = gl.convert_layout(chunks[chunk], LAYOUT).to(gl.float32)
        up_value = value
        if TRAITS.GATED:
            up_value = gl.convert_layout(chunks[chunk + COUNT], LAYOUT).to(gl.float32)
        if TRAITS.STREAM_K:
            for program in range(tile.first_program, gl.program_id(0)):
                value += gl.load(_partial_offsets(args, program, chunk, w, TRAITS), cache_modifier=".cg")
                if TRAITS.GATED:
                    up_value += gl.load(_partial_offsets(args, program, chunk + COUNT, w, TRAITS), cache_modifier=".cg")
        if TRAITS.SCALED:
            b_scale = gl.load(scales.b + b_scales + column * scale_strides.b_column, mask=in_columns, other=0.0)
            value = value * a_scale[:, None] * b_scale[None, :]
            if TRAITS.GATED:
                up_scale = gl.load(scales.up + b_scales + column * scale_strides.b_column, mask=in_columns, other=0.0)
                up_value = up_value * a_scale[:, None] * up_scale[None, :]
        if not TRAITS.PARTIALS:
            value, z_value, z_up = _apply_chain(
                value, up_value, ep, tile, row, column, in_rows, in_columns, m, n, TRAITS
            )  # fmt: skip
            if TRAITS.Z_TMA:
                coords = [entry, first_row, first_column]
                _stage_chunk(z_value, args, ep.z_target, coords, chunk * STORES, w, TRAITS)
                if TRAITS.PACKED != "":
                    _stage_chunk(z_up, args, ep.up_target, coords, chunk * STORES + 1, w, TRAITS)
            if TRAITS.QUANTIZE != "":
                value = _quantize(value, ep, tile, row, in_rows, in_columns, first_column, n, TRAITS)
        if PAIRS:
            _store_chunk(
                up_value, args, chunk * STORES, entry + 1, first_row, first_column, row, column, w, TRAITS
            )  # fmt: skip
        _store_chunk(
            value, args, chunk * STORES + STORES - 1, entry, first_row, first_column, row, column, w, TRAITS
        )  # fmt: skip


@gluon.jit
def _apply_chain(value, up, ep, tile, row, column, in_rows, in_columns, m, n, TRAITS: gl.constexpr):
    """Returns (the epilogue of a chunk of the product, the preactivation, up's). It is stored here unless Z_TMA.

    With DACT: (the activation of z, its gradient, up's).
    """
    CHAIN_BEFORE: gl.constexpr = TRAITS.CHAIN_BEFORE
    CHAIN_AFTER: gl.constexpr = TRAITS.CHAIN_AFTER
    PACKED: gl.constexpr = TRAITS.PACKED
    pointers, strides = ep.pointers, ep.strides
    batch = tile.batch.to(gl.int64)
    STEP: gl.constexpr = 2 if PACKED == "interleaved" else 1  # from one gate to the next
    to_up = 1 if PACKED == "interleaved" else n
    wide_row = row.to(gl.int64)[:, None]
    z_column = column[None, :] * STEP
    inside = in_rows[:, None] & in_columns[None, :]
    if TRAITS.DACT:
        z = pointers.z + (batch * strides.z_batch + wide_row * strides.z_row + z_column)
        z_value = gl.load(z, mask=inside, other=0.0).to(gl.float32)
        z_up = z_value
        if PACKED != "":
            z_up = gl.load(z + to_up, mask=inside, other=0.0).to(gl.float32)
        value, gradient, up_gradient = pull_back_activation(value, z_value, z_up, CHAIN_AFTER)
        if not TRAITS.Z_TMA:
            dz = pointers.dz + (batch * strides.dz_batch + wide_row * strides.dz_row + z_column)
            gl.store(dz, gradient, mask=inside)
            if PACKED != "":
                gl.store(dz + to_up, up_gradient, mask=inside)
        return value, gradient, up_gradient
    else:
        value, up = add_bias(
            value, up, column, in_columns, pointers.bias, pointers.up_bias, strides.bias, CHAIN_BEFORE, PACKED
        )
        if TRAITS.PREACTIVATION and not TRAITS.Z_TMA:
            z = pointers.z + (batch * strides.z_batch + wide_row * strides.z_row + z_column)
            gl.store(z, value, mask=inside)
            if PACKED != "":
                gl.store(z + to_up, up, mask=inside)
        residual = pointers.residual
        if TRAITS.RESIDUAL_BATCHED:
            residual = pointers.residual + batch * strides.residual_batch
        result = apply_epilogue(
            value, up, row, column, column, in_rows, in_columns, pointers.bias, pointers.up_bias, strides.bias,
            residual, strides.residual_row, CHAIN_AFTER, pointers.seed, pointers.device_seed, batch * m, n,
        )  # fmt: skip
        return result, value, up


@gluon.jit
def _quantize(value, ep, tile, row, in_rows, in_columns, first_column, n, TRAITS: gl.constexpr):
    """Divides a chunk by its rows' scales and saturates it; the scales are given, or found and stored."""
    pointers, strides = ep.pointers, ep.strides
    batch, wide_row = tile.batch.to(gl.int64), row.to(gl.int64)
    if TRAITS.QUANTIZE == "block":
        scale = block_scale(value, in_columns)
        target = pointers.block_scales + (batch * strides.block_scales_batch + first_column // 128)
        gl.store(target + wide_row * strides.block_scales_row, scale, mask=in_rows & (first_column < n))
        value = value / scale[:, None]
    if TRAITS.QUANTIZE == "scale":
        scales = pointers.out_scale + (batch * strides.out_scale_batch + wide_row * strides.out_scale_row)
        value = value / gl.load(scales, mask=in_rows, other=1.0)[:, None]
    return saturate_fp8(value)


@gluon.jit
def _store_chunk(
    value, args, index: gl.constexpr, entry, first_row, first_column, row, column, w: gl.constexpr,
    TRAITS: gl.constexpr,
):  # fmt: skip
    """Stores a chunk of C's matrix `entry`; `index` counts the chunks of a work tile."""
    if TRAITS.TMA_STORE:
        _stage_chunk(value, args, args.c, [entry, first_row, first_column], index, w, TRAITS)
    else:
        start = entry.to(gl.int64) * args.epilogue.strides.c_batch + row.to(gl.int64) * args.epilogue.strides.c_row
        inside = (row < args.m)[:, None] & (column < args.n)[None, :]
        gl.store(args.c + start[:, None] + column[None, :], value, mask=inside)


@gluon.jit
def _stage_chunk(value, args, target, coords, index: gl.constexpr, w: gl.constexpr, TRAITS: gl.constexpr):
    """Stores a chunk by TMA, from one of this consumer's buffers; `index` counts the stores of a work tile."""
    buffer = args.buffers.c.index(w * TRAITS.STORE_STAGES + index % TRAITS.STORE_STAGES)
    tma.store_wait(TRAITS.STORE_STAGES - 1)  # TMA has read the chunk that was staged here
    buffer.reshape([TRAITS.ROWS, TRAITS.CHUNK_N]).store(value.to(target.dtype))
    fence_async_shared()
    store_tile(target, coords, buffer)


@gluon.jit
def _partial_offsets(args, program, chunk: gl.constexpr, w: gl.constexpr, TRAITS: gl.constexpr):
    """Returns the addresses of a chunk of a program's partial sums."""
    ROWS: gl.constexpr = TRAITS.ROWS
    CHUNK_N: gl.constexpr = TRAITS.CHUNK_N
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK_N, 16])
    row = w * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    column = chunk * CHUNK_N + gl.arange(0, CHUNK_N, gl.SliceLayout(0, LAYOUT))
    first = args.epilogue.partials.sums + program * (TRAITS.NUM_CONSUMERS * ROWS * TRAITS.BLOCK_N)
    return first + row[:, None] * TRAITS.BLOCK_N + column[None, :]


@gluon.jit
def store_partial(acc, args, w: gl.constexpr, TRAITS: gl.constexpr):
    """Stores this program's sums of a tile that another one finishes, and says so."""
    CHUNK_N: gl.constexpr = TRAITS.CHUNK_N
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK_N, 16])
    program = gl.program_id(0)
    chunks = _chunks(acc, TRAITS)
    for chunk in gl.static_range(TRAITS.BLOCK_N // CHUNK_N):
        value = gl.convert_layout(chunks[chunk], LAYOUT).to(gl.float32)
        gl.store(_partial_offsets(args, program, chunk, w, TRAITS), value)
    synchronize()
    gl.atomic_add(args.epilogue.partials.flags + program * TRAITS.NUM_CONSUMERS + w, 1, sem="release")


@gluon.jit
def await_partials(args, tile, w: gl.constexpr, TRAITS: gl.constexpr):
    """Waits for the partial sums of the programs that share this tile."""
    for program in range(tile.first_program, gl.program_id(0)):
        flag = args.epilogue.partials.flags + program * TRAITS.NUM_CONSUMERS + w
        ready = gl.atomic_add(flag, 0, sem="acquire")
        while ready == 0:
            ready = gl.atomic_add(flag, 0, sem="acquire")
    synchronize()
