"""Device functions for items whose scores may have outgrown what was subtracted from them.

A tile's largest score is found to keep exponentials from overflowing; that, and rescaling by it, is a third of a step's
instructions beside the products. A forward kernel that trusts subtracts the largest score of an item's first tile, and
MARGIN, from all scores of the item, and looks at the sums in the end: as long as they lie between LEAST and MOST, no
weight has overflown, and what vanished would not have counted, since weights in bfloat16 are as exact at any size. So
is the output, for values from 2^-56 to 2^47. Rows with other sums are a reason to doubt their item. When a program has
been through its items it goes through the doubted ones again, with care.

The FP8 kernel looks at sums on its way, and doubts by other bounds.

Int32 [most items] for every program: how many rows there are to doubt in all, and in which item.
"""

from flashkernel.core.gluon import gl, gluon, mbarrier
from flashkernel.ops.attention.hopper.schedule import item_at

MARGIN = gl.constexpr(40.0)  # in powers of two: weights are so much smaller than they could be
LEAST = gl.constexpr(2.0**-70)
MOST = gl.constexpr(2.0**60)
WRITTEN = gl.constexpr("cp.async.bulk.wait_group 0; mov.b32 $0, $1;")


@gluon.jit
def clear(doubts, most):
    """Nothing is doubted yet. The whole program must synchronize before it says otherwise."""
    place = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    for first in range(0, most, 128):
        gl.store(doubts + first + place, place * 0, mask=first + place < most)


@gluon.jit
def doubt(doubts, step, total, counts, least: gl.constexpr, most: gl.constexpr):
    """Doubt a program's item for the sums of its rows, where these count and do not lie between two bounds."""
    wrong = counts & ~((total >= least) & (total <= most))  # as NaN is
    one = wrong.to(gl.int32)
    gl.atomic_add(doubts + one * 0, one, mask=wrong, sem="relaxed")
    gl.atomic_add(doubts + 1 + step + one * 0, one, mask=wrong, sem="relaxed")


@gluon.jit
def settle(done):
    """A warpgroup has been through all items, and its output is where it belongs: what comes later may overwrite it."""
    place = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise(WRITTEN, "=r,r", [place], dtype=gl.int32, is_pure=False, pack=1)
    mbarrier.arrive(done.index(0), count=1)


@gluon.jit
def look(doubts, done):
    """Whether any item is doubted, when all warpgroups have been through theirs."""
    mbarrier.wait(done.index(0), 0)
    return gl.load(doubts, volatile=True) > 0


@gluon.jit
def seek(orders, doubts, step, AGAIN: gl.constexpr):
    """(step, item) of the first item at or after a step, or (AGAIN) of the first that is doubted."""
    step = gl.to_tensor(step)
    if AGAIN:
        while (gl.load(orders + step * 3) >= 0) & (gl.load(doubts + 1 + step, volatile=True) == 0):
            step += 1
    return step, item_at(orders, step)
