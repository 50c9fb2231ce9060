"""Device code of softmaxes in powers of two."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def brought_together(top, other):
    """Two tops of softmaxes, either of which may be -inf: (what the weights beside each are multiplied by to be those
    beside the higher one, and the higher one)."""
    higher = tl.maximum(top, other)
    anchor = tl.where(higher == float("-inf"), 0.0, higher)
    return tl.exp2(top - anchor), tl.exp2(other - anchor), higher
