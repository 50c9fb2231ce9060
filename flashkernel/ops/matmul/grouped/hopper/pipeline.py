"""Consumers' sides of the pipeline beside `multiply` of the dense product (hopper/kernel.py).

They have the form of `multiply`: with a branch between products under way, ptxas waits for each product on its own.
They look at the traits and arguments that `multiply` looks at, and release stages as it does.
"""

from flashkernel.blocks.pipeline_gluon import PipelineState, next_stage
from flashkernel.core.gluon import gl, gluon, mbarrier, named_barrier_arrive, warpgroup_mma, warpgroup_mma_wait
from flashkernel.ops.matmul.hopper.kernel import a_operand


@gluon.jit
def _b_operand(tile, COLUMNS: gl.constexpr, TAIL: gl.constexpr, TRAITS: gl.constexpr):
    """Returns the first TAIL columns of a tile [BLOCK_K, COLUMNS] of B."""
    BLOCK_K: gl.constexpr = TRAITS.BLOCK_K
    if TRAITS.B_K_MAJOR:
        return tile.reshape([COLUMNS, BLOCK_K]).slice(0, TAIL, 0).permute((1, 0))
    else:
        return tile.reshape([BLOCK_K, COLUMNS]).slice(0, TAIL, 1)


@gluon.jit
def _issue_tail(args, state, acc, w: gl.constexpr, USE_ACC: gl.constexpr, TRAITS: gl.constexpr):
    """Issues acc += A B (or acc = A B) of a stage and TAIL_N columns, once TMA has loaded it."""
    BLOCK_N: gl.constexpr = TRAITS.BLOCK_N
    TAIL_N: gl.constexpr = TRAITS.TAIL_N
    stage, phase = state
    mbarrier.wait(args.full.index(stage), phase)
    b = _b_operand(args.buffers.b.index(stage), BLOCK_N, TAIL_N, TRAITS)
    return warpgroup_mma(a_operand(args, stage, w, TRAITS), b, acc, use_acc=USE_ACC, is_async=True)


@gluon.jit
def multiply_tail(args, position, num_blocks, w: gl.constexpr, TRAITS: gl.constexpr):
    """Returns the sum [ROWS, TAIL_N] of a work tile that has no more columns: `multiply` with narrower products."""
    NUM_STAGES: gl.constexpr = TRAITS.NUM_STAGES
    ROWS: gl.constexpr = TRAITS.ROWS
    TAIL_N: gl.constexpr = TRAITS.TAIL_N
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TAIL_N, TRAITS.BLOCK_K // 4])
    zeros = gl.zeros([ROWS, TAIL_N], gl.float32, LAYOUT)
    state = PipelineState(position % NUM_STAGES, (position // NUM_STAGES) & 1)
    acc = warpgroup_mma_wait(1, deps=[_issue_tail(args, state, zeros, w, False, TRAITS)])
    for _ in range(1, num_blocks):
        previous = state.stage
        state = next_stage(state, NUM_STAGES)
        acc = warpgroup_mma_wait(1, deps=[_issue_tail(args, state, acc, w, True, TRAITS)])
        named_barrier_arrive(previous, TRAITS.NUM_CONSUMERS)
    acc = warpgroup_mma_wait(0, deps=[acc])
    named_barrier_arrive(state.stage, TRAITS.NUM_CONSUMERS)
    return acc


@gluon.jit
def _issue_gate_up(args, state, gate, up, w: gl.constexpr, USE_ACC: gl.constexpr, TRAITS: gl.constexpr):
    """Issues the products of a stage with gate's and up's columns, once it is loaded."""
    HALF: gl.constexpr = TRAITS.BLOCK_N // 2
    stage, phase = state
    mbarrier.wait(args.full.index(stage), phase)
    a = a_operand(args, stage, w, TRAITS)
    gate_columns = _b_operand(args.buffers.b.index(stage * 2), HALF, HALF, TRAITS)
    up_columns = _b_operand(args.buffers.b.index(stage * 2 + 1), HALF, HALF, TRAITS)
    gate = warpgroup_mma(a, gate_columns, gate, use_acc=USE_ACC, is_async=True)
    up = warpgroup_mma(a, up_columns, up, use_acc=USE_ACC, is_async=True)
    return gate, up


@gluon.jit
def multiply_gate_up(args, position, num_blocks, w: gl.constexpr, TRAITS: gl.constexpr):
    """Returns the sums of gate and up, [ROWS, BLOCK_N / 2] each: `multiply` with two accumulators."""
    NUM_STAGES: gl.constexpr = TRAITS.NUM_STAGES
    ROWS: gl.constexpr = TRAITS.ROWS
    HALF: gl.constexpr = TRAITS.BLOCK_N // 2
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, TRAITS.BLOCK_K // 4])
    zeros = gl.zeros([ROWS, HALF], gl.float32, LAYOUT)
    state = PipelineState(position % NUM_STAGES, (position // NUM_STAGES) & 1)
    gate, up = _issue_gate_up(args, state, zeros, zeros, w, False, TRAITS)
    gate, up = warpgroup_mma_wait(2, deps=[gate, up])
    for _ in range(1, num_blocks):
        previous = state.stage
        state = next_stage(state, NUM_STAGES)
        gate, up = _issue_gate_up(args, state, gate, up, w, True, TRAITS)
        gate, up = warpgroup_mma_wait(2, deps=[gate, up])
        named_barrier_arrive(previous, TRAITS.NUM_CONSUMERS)
    gate, up = warpgroup_mma_wait(0, deps=[gate, up])
    named_barrier_arrive(state.stage, TRAITS.NUM_CONSUMERS)
    return gate, up


@gluon.jit
def skip_work_tile(args, position, num_blocks, TRAITS: gl.constexpr):
    """Releases the stages of a work tile in which this consumer has no rows."""
    state = PipelineState(position % TRAITS.NUM_STAGES, (position // TRAITS.NUM_STAGES) & 1)
    for _ in range(num_blocks):
        mbarrier.wait(args.full.index(state.stage), state.phase)
        named_barrier_arrive(state.stage, TRAITS.NUM_CONSUMERS)
        state = next_stage(state, TRAITS.NUM_STAGES)
