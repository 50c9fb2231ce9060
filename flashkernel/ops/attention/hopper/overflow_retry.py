"""Overflow retry of the optimistic softmax: work tiles whose row sums overflow are flagged and computed again.

The online softmax spends a third of a K block's instructions (beside the matrix products) on the row max and on
rescaling by it. With FIXED_MAX the forward kernel takes the row max m of a work tile's first K block, adds MARGIN_LOG2,
and uses it for all K blocks: P = exp2(S - m - MARGIN_LOG2), O is never rescaled. It checks the row sums l at the end.
If l lies in [MIN_ROW_SUM, MAX_ROW_SUM], no element of P overflowed, and the elements that underflowed do not count:
bfloat16 has the same precision at any magnitude. O is then exact for values from 2^-56 to 2^47. A row sum outside flags
the work tile. After its last work tile a program computes the flagged ones again with the online softmax.

The FP8 kernel checks partial sums in its main loop, and flags work tiles by other bounds.

retry_flags is int32 [max work tiles] for every program: the total number of flagged rows, then that of each work tile.
"""

from flashkernel.core.gluon import gl, gluon, mbarrier
from flashkernel.ops.attention.hopper.pipeline import work_tile_at

MARGIN_LOG2 = gl.constexpr(40.0)
MIN_ROW_SUM = gl.constexpr(2.0**-70)
MAX_ROW_SUM = gl.constexpr(2.0**60)
_WAIT_STORES = gl.constexpr("cp.async.bulk.wait_group 0; mov.b32 $0, $1;")


@gluon.jit
def clear_flags(retry_flags, max_work_tiles):
    """Clear the flags. The whole program must synchronize before it sets one."""
    lane = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    for first in range(0, max_work_tiles, 128):
        gl.store(retry_flags + first + lane, lane * 0, mask=first + lane < max_work_tiles)


@gluon.jit
def flag_overflow(retry_flags, step, row_sum, valid, minimum: gl.constexpr, maximum: gl.constexpr):
    """Flag work tile number `step` for every `valid` row whose sum is not in [minimum, maximum], as NaN is not."""
    overflowed = valid & ~((row_sum >= minimum) & (row_sum <= maximum))
    one = overflowed.to(gl.int32)
    gl.atomic_add(retry_flags + one * 0, one, mask=overflowed, sem="relaxed")
    gl.atomic_add(retry_flags + 1 + step + one * 0, one, mask=overflowed, sem="relaxed")


@gluon.jit
def stores_done(first_pass_done):
    """Wait until this consumer's TMA stores are written, since a retry may overwrite them, and arrive."""
    lane = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise(_WAIT_STORES, "=r,r", [lane], dtype=gl.int32, is_pure=False, pack=1)
    mbarrier.arrive(first_pass_done.index(0), count=1)


@gluon.jit
def any_flagged(retry_flags, first_pass_done):
    """Wait for all consumers' first pass; True if any work tile is flagged."""
    mbarrier.wait(first_pass_done.index(0), 0)
    return gl.load(retry_flags, volatile=True) > 0


@gluon.jit
def next_work_tile(work_tiles, retry_flags, step, RETRY: gl.constexpr, VARLEN: gl.constexpr = False):
    """Returns (step, work tile) of the first work tile at or after `step`; with RETRY, of the first flagged one."""
    step = gl.to_tensor(step)
    if RETRY:
        ENTRY: gl.constexpr = 2 if VARLEN else 3
        if VARLEN:
            entries = work_tiles.table + work_tiles.work_tiles
        else:
            entries = work_tiles
        while (gl.load(entries + step * ENTRY) >= 0) & (gl.load(retry_flags + 1 + step, volatile=True) == 0):
            step += 1
    return step, work_tile_at(work_tiles, step, VARLEN)
