"""The search for the threshold that kept logits exceed, of top-k and top-p.

It keeps an interval (low, high]: logits above `high` are kept, those up to `low` are not. A pass over the row adds the
weights (1 for top-k, probabilities for top-p) above seven pivots and so narrows the interval. It also collects the
logits of a range: in the first pass around an estimate from a sample of the row, then the interval itself. If the
threshold is in the range and its logits fit CAPACITY, they are bisected in registers, over the 32 bits of a float.
"""

import triton
import triton.language as tl

from flashkernel.blocks.softmax_triton import LOG2E

LOWEST = tl.constexpr(-1e30)
INFINITY = tl.constexpr(float("inf"))
_COARSE = tl.constexpr(1024)  # steps of 32-bit keys that an estimate may be off by
_NEAR = tl.constexpr(0.025)  # share of the row to either side of the estimate that the first pass collects: 5% of
_FAR = tl.constexpr(0.08)  # 128,256 fit CAPACITY, and so does what lies between _NEAR and _FAR


@triton.jit
def exp_scaled(x, largest, temperature):
    """exp((x - largest) / temperature)"""
    return tl.exp2((x - largest) * (LOG2E / temperature))


@triton.jit
def load_row(base, column, vocab):
    """Logits of these columns; -inf for those of probability 0. Adding 0 turns -0 into 0."""
    x = tl.load(base + column, mask=column < vocab, other=-INFINITY).to(tl.float32)
    return tl.where(x > LOWEST, x + 0.0, -INFINITY)


@triton.jit
def _order(x):
    """int32 that sort as the floats x do."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _value(key):
    """The float of a key; that of -1 is below 0, as -0 compares equal to 0."""
    bits = tl.where(key < 0, key ^ 0x7FFFFFFF, key)
    return tl.where(key == -1, -1.1754944e-38, bits.to(tl.float32, bitcast=True))


@triton.jit
def _weight(x, largest, temperature, COUNT: tl.constexpr):
    """1 for each logit (top-k), or its probability up to a factor (top-p); 0 for -inf."""
    if COUNT:
        return tl.where(x > -INFINITY, 1.0, 0.0)
    else:
        return exp_scaled(x, largest, temperature)


@triton.jit
def _pivot(low, high, spread, temperature, OFFSET: tl.constexpr, SHARE: tl.constexpr):
    """A pivot between low and high: at an offset below high if low is not known yet, else by its share of the way.

    After four passes it is the share of the floats between them, at least one float above low: those near 0 would halve
    150 times.
    """
    below, above = _order(low), _order(high)
    half = (((above >> 1) - (below >> 1)).to(tl.float32) * SHARE).to(tl.int32)  # the whole may exceed 31 bits
    by_order = _value(below + tl.maximum(half + half, 1))
    inside = tl.where(spread > 1e6, by_order, low + (high - low) * SHARE)
    return tl.where(low > LOWEST, inside, high - OFFSET * spread * temperature)


@triton.jit
def _above(x, weight, pivot):
    """The weights above a pivot, [lanes] of [lanes, GROUP]."""
    return tl.sum(tl.where(x > pivot, weight, 0.0), 1)


@triton.jit
def _step(low, high, pivot, sums, target):
    """The interval after one more pivot."""
    weight = tl.sum(sums, 0)
    inside = (pivot > low) & (pivot < high)
    reaches = weight >= target
    return tl.where(inside & reaches, pivot, low), tl.where(inside & (not reaches), pivot, high)


@triton.jit
def _narrowed(key, weight, below, above, high_weight, target, EXACT: tl.constexpr):
    """The largest key whose weights above it, with `high_weight`, reach the target, by bisection of (below, above)."""
    more = above - 1 > below
    while more:
        middle = (below >> 1) + (above >> 1) + (below & above & 1)
        reaches = high_weight + tl.sum(tl.where(key > middle, weight, 0.0), 0) >= target
        below = tl.where(reaches, middle, below)
        above = tl.where(reaches, above, middle)
        if EXACT:
            more = above - 1 > below
        else:
            more = (above >> 1) - (below >> 1) > _COARSE
    return below


@triton.jit
def _bisect(collected, found, low, high, high_weight, target, largest, temperature, COUNT: tl.constexpr,
            CAPACITY: tl.constexpr):  # fmt: skip
    """The threshold among the collected logits."""
    index = tl.arange(0, CAPACITY)
    x = tl.load(collected + index, mask=index < found, other=-INFINITY)
    weight = _weight(x, largest, temperature, COUNT)
    return _value(_narrowed(_order(x), weight, _order(low), _order(high), high_weight, target, True))


@triton.jit
def _ranked(key, exists, below, above, largest, rank):
    """The value above which so many of the sample's logits lie; `largest` for a rank that is not positive."""
    value = _value(_narrowed(key, exists, below, above, 0.0, rank, False))
    return tl.where(rank > 0, value, largest)


@triton.jit
def _estimate(base, vocab, largest, temperature, target, share, COUNT: tl.constexpr, SAMPLE: tl.constexpr,
              GROUP: tl.constexpr):  # fmt: skip
    """(far low, near low, near high, far high): values around the threshold of SAMPLE logits from all over the row."""
    index = tl.arange(0, SAMPLE)
    stride = vocab // (SAMPLE // GROUP) // GROUP * GROUP
    x = load_row(base, index // GROUP * stride + index % GROUP, vocab)
    weight = _weight(x, largest, temperature, COUNT)
    if COUNT:
        wanted = target * SAMPLE / vocab
    else:
        wanted = share * tl.sum(weight, 0)
    key, below, above = _order(x), _order(largest * 0.0 + LOWEST), _order(largest)
    exists = tl.where(x > -INFINITY, 1.0, 0.0)
    estimate = _narrowed(key, weight, below, above, 0.0, wanted, False)
    rank = tl.sum(tl.where(key > estimate, exists, 0.0), 0)
    return (
        _ranked(key, exists, below, above, largest, rank + _FAR * SAMPLE),
        _ranked(key, exists, below, above, largest, rank + _NEAR * SAMPLE),
        _ranked(key, exists, below, above, largest, rank - _NEAR * SAMPLE),
        _ranked(key, exists, below, above, largest, rank - _FAR * SAMPLE),
    )


@triton.jit
def threshold(base, collected, vocab, largest, temperature, low, target, share, COUNT: tl.constexpr,
               CHUNK: tl.constexpr, GROUP: tl.constexpr, CAPACITY: tl.constexpr, NUM_STAGES: tl.constexpr):  # fmt: skip
    """The value above which logits are kept: x is kept if the weights above it are less than the target.

    For probabilities (not COUNT) the target is `share` of all above `low`; `target` is then 0.
    """
    high = largest
    spread = target * 0.0 + 1.0
    from_low, to_high = low, high  # the range that a pass collects
    far_low, far_high = low, high
    estimated = (low <= LOWEST) & (vocab > CAPACITY)
    if estimated:
        far_low, from_low, to_high, far_high = _estimate(
            base, vocab, largest, temperature, target, share, COUNT, 2 * CHUNK, GROUP
        )
    lane = tl.arange(0, CHUNK // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]  # [lanes, GROUP]
    searching = True
    while searching:
        p1 = tl.where(estimated, far_low, _pivot(low, high, spread, temperature, 14.0, 0.16))
        p2 = _pivot(low, high, spread, temperature, 8.0, 0.33)
        p3 = _pivot(low, high, spread, temperature, 4.5, 0.5)
        p4 = _pivot(low, high, spread, temperature, 2.0, 0.67)
        p5 = tl.where(estimated, far_high, _pivot(low, high, spread, temperature, 0.7, 0.84))
        zeros = tl.zeros([CHUNK // GROUP], tl.float32)
        s0, s1, s2, s3, s4, s5, s6, s7 = zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros
        found = 0
        for start in tl.range(0, vocab, CHUNK, num_stages=NUM_STAGES):
            x = load_row(base, start + lane, vocab)
            weight = _weight(x, largest, temperature, COUNT)
            s0 += _above(x, weight, low)
            s1 += _above(x, weight, p1)
            s2 += _above(x, weight, p2)
            s3 += _above(x, weight, p3)
            s4 += _above(x, weight, p4)
            s5 += _above(x, weight, p5)
            s6 += _above(x, weight, from_low)
            s7 += _above(x, weight, to_high)
            taken = ((x > from_low) & (x <= to_high)).to(tl.int32)
            by_lane = tl.sum(taken, 1)
            before = tl.cumsum(by_lane, 0) - by_lane
            slot = found + before[:, None] + tl.cumsum(taken, 1) - taken
            tl.store(collected + slot, x, mask=(taken != 0) & (slot < CAPACITY))
            found += tl.sum(by_lane, 0)
        if not COUNT:  # the share of what lies above the first `low`
            target = tl.where(target > 0, target, share * tl.sum(s0, 0))
        high_weight = tl.sum(s7, 0)
        holds = (tl.sum(s6, 0) >= target) & (high_weight < target)
        holds |= (from_low == low) & (to_high == high)
        if holds & (found <= CAPACITY):
            tl.debug_barrier()
            low = _bisect(
                collected, found, from_low, to_high, high_weight, target, largest, temperature, COUNT, CAPACITY
            )
            searching = False
        else:
            low_before, high_before = low, high
            low, high = _step(low, high, p1, s1, target)
            low, high = _step(low, high, p2, s2, target)
            low, high = _step(low, high, p3, s3, target)
            low, high = _step(low, high, p4, s4, target)
            low, high = _step(low, high, p5, s5, target)
            low, high = _step(low, high, from_low, s6, target)
            low, high = _step(low, high, to_high, s7, target)
            spread *= 32.0
            from_low, to_high, estimated = low, high, False
            # Neighboring floats have no pivot between them: the logits left are equal, and are kept.
            searching = (low != low_before) | (high != high_before) | ((low <= LOWEST) & (spread < 1e35))
    return low
