"""Consumers' sides of the pipeline beside `multiply` of the dense product (hopper/kernel.py).

They look at the traits and arguments that `multiply` looks at, and release stages as it does.
"""

from flashkernel.blocks.pipeline_gluon import PipelineState, next_stage
from flashkernel.core.gluon import gl, gluon, mbarrier, named_barrier_arrive, warpgroup_mma, warpgroup_mma_wait


@gluon.jit
def _a_operand(args, stage, w: gl.constexpr, TRAITS: gl.constexpr):
    """Returns consumer w's tile [ROWS, BLOCK_K] of A."""
    ROWS: gl.constexpr = TRAITS.ROWS
    BLOCK_K: gl.constexpr = TRAITS.BLOCK_K
    tile = args.buffers.a.index(stage * TRAITS.NUM_CONSUMERS + w)
    if TRAITS.A_K_MAJOR:
        return tile.reshape([ROWS, BLOCK_K])
    else:
        return tile.reshape([BLOCK_K, ROWS]).permute((1, 0))


@gluon.jit
def _b_operand(tile, COLUMNS: gl.constexpr, TAIL: gl.constexpr, TRAITS: gl.constexpr):
    """Returns the first TAIL columns of a tile [BLOCK_K, COLUMNS] of B."""
    BLOCK_K: gl.constexpr = TRAITS.BLOCK_K
    if TRAITS.B_K_MAJOR:
        return tile.reshape([COLUMNS, BLOCK_K]).slice(0, TAIL, 0).permute((1, 0))
    else:
        return tile.reshape([BLOCK_K, COLUMNS]).slice(0, TAIL, 1)


@gluon.jit
def multiply_tail(args, position, num_blocks, w: gl.constexpr, TRAITS: gl.constexpr):
    """Returns the sum [ROWS, TAIL_N] of a work tile that has no more columns: `multiply` with narrower products."""
    NUM_STAGES: gl.constexpr = TRAITS.NUM_STAGES
    ROWS: gl.constexpr = TRAITS.ROWS
    BLOCK_N: gl.constexpr = TRAITS.BLOCK_N
    TAIL_N: gl.constexpr = TRAITS.TAIL_N
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TAIL_N, TRAITS.BLOCK_K // 4])
    acc = gl.zeros([ROWS, TAIL_N], gl.float32, LAYOUT)
    state = PipelineState(position % NUM_STAGES, (position // NUM_STAGES) & 1)
    previous = state.stage
    for block in range(num_blocks):
        stage, phase = state
        mbarrier.wait(args.full.index(stage), phase)
        b = _b_operand(args.buffers.b.index(stage), BLOCK_N, TAIL_N, TRAITS)
        product = warpgroup_mma(_a_operand(args, stage, w, TRAITS), b, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[product])
        if block > 0:
            named_barrier_arrive(previous, TRAITS.NUM_CONSUMERS)
        previous = stage
        state = next_stage(state, NUM_STAGES)
    acc = warpgroup_mma_wait(0, deps=[acc])
    named_barrier_arrive(previous, TRAITS.NUM_CONSUMERS)
    return acc


@gluon.jit
def multiply_gate_up(args, position, num_blocks, w: gl.constexpr, TRAITS: gl.constexpr):
    """Returns the sums of gate and up, [ROWS, BLOCK_N / 2] each: `multiply` with two accumulators."""
    NUM_STAGES: gl.constexpr = TRAITS.NUM_STAGES
    ROWS: gl.constexpr = TRAITS.ROWS
    HALF: gl.constexpr = TRAITS.BLOCK_N // 2
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, TRAITS.BLOCK_K // 4])
    gate = gl.zeros([ROWS, HALF], gl.float32, LAYOUT)
    up = gl.zeros([ROWS, HALF], gl.float32, LAYOUT)
    state = PipelineState(position % NUM_STAGES, (position // NUM_STAGES) & 1)
    previous = state.stage
    for block in range(num_blocks):
        stage, phase = state
        mbarrier.wait(args.full.index(stage), phase)
        a = _a_operand(args, stage, w, TRAITS)
        gate = warpgroup_mma(
            a, _b_operand(args.buffers.b.index(stage * 2), HALF, HALF, TRAITS), gate, is_async=True
        )  # fmt: skip
        up = warpgroup_mma(
            a, _b_operand(args.buffers.b.index(stage * 2 + 1), HALF, HALF, TRAITS), up, is_async=True
        )  # fmt: skip
        gate, up = warpgroup_mma_wait(2, deps=[gate, up])
        if block > 0:
            named_barrier_arrive(previous, TRAITS.NUM_CONSUMERS)
        previous = stage
        state = next_stage(state, NUM_STAGES)
    gate, up = warpgroup_mma_wait(0, deps=[gate, up])
    named_barrier_arrive(previous, TRAITS.NUM_CONSUMERS)
    return gate, up


@gluon.jit
def release_unread(args, position, num_blocks, TRAITS: gl.constexpr):
    """Releases the stages of a work tile in which this consumer has no rows."""
    state = PipelineState(position % TRAITS.NUM_STAGES, (position // TRAITS.NUM_STAGES) & 1)
    for _ in range(num_blocks):
        mbarrier.wait(args.full.index(state.stage), state.phase)
        named_barrier_arrive(state.stage, TRAITS.NUM_CONSUMERS)
        state = next_stage(state, TRAITS.NUM_STAGES)
