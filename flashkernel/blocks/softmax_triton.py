"""Device code of softmaxes in powers of two."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tanh(x):
    # By the sigmoid a small value would lose its digits to the 1; there, the first terms of the series.
    y = x * x
    series = x * (1 + y * (-0.3333333333 + y * (0.1333333333 + y * (-0.0539682540 + y * 0.0218694885))))
    return tl.where(y < 0.0625, series, 2 * tl.sigmoid(2 * x) - 1)


@triton.jit
def brought_together(top, other):
    """Two tops of softmaxes, either of which may be -inf: (what the weights beside each are multiplied by to be those
    beside the higher one, and the higher one)."""
    higher = tl.maximum(top, other)
    anchor = tl.where(higher == float("-inf"), 0.0, higher)
    return tl.exp2(top - anchor), tl.exp2(other - anchor), higher
