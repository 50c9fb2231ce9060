"""Device functions of Hopper kernels: positions in a ring of pipeline stages, and accumulators cut by columns."""

from typing import Any, NamedTuple

from flashkernel.core.gluon import gl, gluon


class PipelineState(NamedTuple):
    """A position in a ring of stages: the stage, and the parity of the mbarrier phase that its loads complete."""

    stage: Any
    phase: Any


@gluon.jit
def stage_of(count, NUM_STAGES: gl.constexpr):
    """Returns the position of number `count` of what goes through the ring."""
    return PipelineState(count % NUM_STAGES, (count // NUM_STAGES) & 1)


@gluon.jit
def next_stage(state, NUM_STAGES: gl.constexpr):
    """Returns the position behind `state`. Counted up, since `%` and `//` take more instructions."""
    stage, phase = state
    following = stage + 1
    wraps = following == NUM_STAGES
    return PipelineState(gl.where(wraps, 0, following), gl.where(wraps, phase ^ 1, phase))


@gluon.jit
def split_columns(x):
    """Splits [rows, columns] into two halves of the columns. No data moves: a thread's registers are told apart."""
    return gl.split(x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)))


@gluon.jit
def join_columns(left, right):
    """Joins two halves of the columns."""
    both = gl.join(left, gl.convert_layout(right, left.type.layout))
    return both.permute((0, 2, 1)).reshape([left.shape[0], 2 * left.shape[1]])
