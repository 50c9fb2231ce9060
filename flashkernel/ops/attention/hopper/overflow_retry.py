"""Optimistic softmax with a fixed row max: flags for work items that overflowed, which are computed again.

Finding a tile's row max, and rescaling by it, is a third of a step's instructions beside the products. With FIXED_MAX a
forward kernel subtracts the row max of an item's first key tile, and MARGIN, from all scores of the item. It checks the
row sums at the end: as long as they lie in [LEAST, MOST], no weight overflowed, and weights that underflowed would not
have counted, since bfloat16 has the same precision at any magnitude. The output is then exact for values from 2^-56 to
2^47. A row whose sum lies outside flags its item. After its last item a program computes the flagged ones again with
the online softmax.

The FP8 kernel checks sums on its way, and flags by other bounds.

retry_flags is int32 [most items] for every program: the number of flagged rows in all, then that of each item.
"""

from flashkernel.core.gluon import gl, gluon, mbarrier
from flashkernel.ops.attention.hopper.schedule import item_at

MARGIN = gl.constexpr(40.0)  # in powers of two: weights are so much smaller than they could be
LEAST = gl.constexpr(2.0**-70)
MOST = gl.constexpr(2.0**60)
WRITTEN = gl.constexpr("cp.async.bulk.wait_group 0; mov.b32 $0, $1;")


@gluon.jit
def clear(retry_flags, most):
    """Clear the flags. The whole program must synchronize before it sets one."""
    place = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    for first in range(0, most, 128):
        gl.store(retry_flags + first + place, place * 0, mask=first + place < most)


@gluon.jit
def flag(retry_flags, step, total, counts, least: gl.constexpr, most: gl.constexpr):
    """Flag an item for rows that count (`counts`) and whose sum `total` is not in [least, most]."""
    wrong = counts & ~((total >= least) & (total <= most))  # as NaN is
    one = wrong.to(gl.int32)
    gl.atomic_add(retry_flags + one * 0, one, mask=wrong, sem="relaxed")
    gl.atomic_add(retry_flags + 1 + step + one * 0, one, mask=wrong, sem="relaxed")


@gluon.jit
def stores_done(done):
    """Wait until this warpgroup's TMA stores have been written, and arrive: a retry may overwrite them."""
    place = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise(WRITTEN, "=r,r", [place], dtype=gl.int32, is_pure=False, pack=1)
    mbarrier.arrive(done.index(0), count=1)


@gluon.jit
def any_flagged(retry_flags, done):
    """Wait for all warpgroups' first pass; True if any item is flagged."""
    mbarrier.wait(done.index(0), 0)
    return gl.load(retry_flags, volatile=True) > 0


@gluon.jit
def next_work_tile(orders, retry_flags, step, RETRY: gl.constexpr):
    """(step, item) of the first item at or after `step`, or (RETRY) of the first flagged one."""
    step = gl.to_tensor(step)
    if RETRY:
        while (gl.load(orders + step * 3) >= 0) & (gl.load(retry_flags + 1 + step, volatile=True) == 0):
            step += 1
    return step, item_at(orders, step)
