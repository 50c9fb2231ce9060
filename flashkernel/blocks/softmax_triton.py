"""Device code of softmaxes in powers of two."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashkernel.blocks import constants

LOG2E = tl.constexpr(constants.LOG2E)
LN2 = tl.constexpr(constants.LN2)


class SoftmaxState(NamedTuple):
    """Of the K blocks so far: O [BLOCK_M, BLOCK_DV], unnormalized, with its row sums l and row maxima m [BLOCK_M]."""

    acc: Any
    row_sum: Any
    row_max: Any


@triton.jit
def tanh(x):
    """By the sigmoid: an absolute error of a rounding of 1, also where x is small."""
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def accurate_tanh(x):
    """With the first terms of the series where x is small, so that it keeps its digits there."""
    y = x * x
    series = x * (1 + y * (-0.3333333333 + y * (0.1333333333 + y * (-0.0539682540 + y * 0.0218694885))))
    return tl.where(y < 0.0625, series, tanh(x))


@triton.jit
def merge_row_max(a, b):
    """Merges two row maxima in powers of two, either of which may be -inf.

    Returns (scale_a, scale_b, row_max), where scale_x = exp2(x - row_max).
    """
    row_max = tl.maximum(a, b)
    finite = tl.where(row_max == float("-inf"), 0.0, row_max)
    return tl.exp2(a - finite), tl.exp2(b - finite), row_max
