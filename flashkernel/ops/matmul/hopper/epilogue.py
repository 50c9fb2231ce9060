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


class EpilogueArgs(NamedTuple):
    """Addresses and strides (in elements) of what the epilogue reads and writes. Matrices have (batch, row) strides."""

    z: Any  # the preactivation
    dz: Any
    z_target: Any  # Z_TMA: TMA descriptors of what is written of these two; of a gate, of its two halves
    up_target: Any
    bias: Any
    up_bias: Any
    residual: Any
    seed: Any  # of dropout: a `seed_word`, or None
    device_seed: Any  # the address of a number to be scrambled
    out_scale: Any  # C in fp8 is divided by it
    block_scales: Any  # scales of C in fp8 are written there
    a_scale: Any
    b_scale: Any
    up_scale: Any
    c_strides: Any
    z_strides: Any
    dz_strides: Any
    bias_stride: Any
    residual_strides: Any
    out_scale_strides: Any
    block_scales_strides: Any
    a_scale_batch_stride: Any
    a_scale_stride: Any
    a_scale_block_stride: Any  # from one K block to the next (BLOCK_SCALED)
    b_scale_batch_stride: Any
    b_scale_stride: Any
    b_scale_block_stride: Any
    partials: Any  # STREAM_K: sums of tiles that another program finishes, [num_programs, BLOCK_M, BLOCK_N]
    partial_flags: Any  # STREAM_K: 1 once they are there, [num_programs, NUM_CONSUMERS]; 0 before


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
    if TRAITS.PINGPONG:
        first_row = tile.row * ROWS
    else:
        first_row = (tile.row * TRAITS.NUM_CONSUMERS + w) * ROWS
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    in_rows = row < m
    if TRAITS.SCALED:
        a_scale = gl.load(
            ep.a_scale + tile.batch * ep.a_scale_batch_stride + row * ep.a_scale_stride, mask=in_rows, other=0.0
        )
        b_scales = tile.batch * ep.b_scale_batch_stride  # and up's
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
            b_scale = gl.load(ep.b_scale + b_scales + column * ep.b_scale_stride, mask=in_columns, other=0.0)
            value = value * a_scale[:, None] * b_scale[None, :]
            if TRAITS.GATED:
                up_scale = gl.load(ep.up_scale + b_scales + column * ep.b_scale_stride, mask=in_columns, other=0.0)
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
    batch = tile.batch.to(gl.int64)
    STEP: gl.constexpr = 2 if PACKED == "interleaved" else 1  # from one gate to the next
    to_up = 1 if PACKED == "interleaved" else n
    wide_row = row.to(gl.int64)[:, None]
    z_column = column[None, :] * STEP
    inside = in_rows[:, None] & in_columns[None, :]
    if TRAITS.DACT:
        z = ep.z + (batch * ep.z_strides[0] + wide_row * ep.z_strides[1] + z_column)
        z_value = gl.load(z, mask=inside, other=0.0).to(gl.float32)
        z_up = z_value
        if PACKED != "":
            z_up = gl.load(z + to_up, mask=inside, other=0.0).to(gl.float32)
        value, gradient, up_gradient = pull_back_activation(value, z_value, z_up, CHAIN_AFTER)
        if not TRAITS.Z_TMA:
            dz = ep.dz + (batch * ep.dz_strides[0] + wide_row * ep.dz_strides[1] + z_column)
            gl.store(dz, gradient, mask=inside)
            if PACKED != "":
                gl.store(dz + to_up, up_gradient, mask=inside)
        return value, gradient, up_gradient
    else:
        value, up = add_bias(value, up, column, in_columns, ep.bias, ep.up_bias, ep.bias_stride, CHAIN_BEFORE, PACKED)
        if TRAITS.PREACTIVATION and not TRAITS.Z_TMA:
            z = ep.z + (batch * ep.z_strides[0] + wide_row * ep.z_strides[1] + z_column)
            gl.store(z, value, mask=inside)
            if PACKED != "":
                gl.store(z + to_up, up, mask=inside)
        residual = ep.residual
        if TRAITS.RESIDUAL_BATCHED:
            residual = ep.residual + batch * ep.residual_strides[0]
        result = apply_epilogue(
            value, up, row, column, column, in_rows, in_columns, ep.bias, ep.up_bias, ep.bias_stride,
            residual, ep.residual_strides[1], CHAIN_AFTER, ep.seed, ep.device_seed, batch * m, n,
        )  # fmt: skip
        return result, value, up


@gluon.jit
def _quantize(value, ep, tile, row, in_rows, in_columns, first_column, n, TRAITS: gl.constexpr):
    """Divides a chunk by its rows' scales and saturates it; the scales are given, or found and stored."""
    batch, wide_row = tile.batch.to(gl.int64), row.to(gl.int64)
    if TRAITS.QUANTIZE == "block":
        scale = block_scale(value, in_columns)
        target = ep.block_scales + (batch * ep.block_scales_strides[0] + first_column // 128)
        gl.store(target + wide_row * ep.block_scales_strides[1], scale, mask=in_rows & (first_column < n))
        value = value / scale[:, None]
    if TRAITS.QUANTIZE == "scale":
        scales = ep.out_scale + (batch * ep.out_scale_strides[0] + wide_row * ep.out_scale_strides[1])
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
        start = entry.to(gl.int64) * args.epilogue.c_strides[0] + row.to(gl.int64) * args.epilogue.c_strides[1]
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
    first = args.epilogue.partials + program * (TRAITS.NUM_CONSUMERS * ROWS * TRAITS.BLOCK_N)
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
    gl.atomic_add(args.epilogue.partial_flags + program * TRAITS.NUM_CONSUMERS + w, 1, sem="release")


@gluon.jit
def await_partials(args, tile, w: gl.constexpr, TRAITS: gl.constexpr):
    """Waits for the partial sums of the programs that share this tile."""
    for program in range(tile.first_program, gl.program_id(0)):
        flag = args.epilogue.partial_flags + program * TRAITS.NUM_CONSUMERS + w
        ready = gl.atomic_add(flag, 0, sem="acquire")
        while ready == 0:
            ready = gl.atomic_add(flag, 0, sem="acquire")
    synchronize()
