"""The rotary embedding's device code: the angles of a token, pairs of dims into registers, and their rotation."""

from typing import Any, NamedTuple

import triton
import triton.language as tl


@triton.jit
def _cos_sin(phase):
    """(cos, sin) of a phase in units of 2^-64 of a full rotation."""
    top = (phase >> 32).to(tl.int32)  # in units of 2^-32 of a full rotation
    quarter = ((top >> 29) + 1) >> 1  # the nearest quarter of a rotation
    x = (top - (quarter << 30)).to(tl.float32) * 1.4629180792671596e-09  # radians in [-pi / 4, pi / 4]
    y = x * x
    sine = x + x * y * (-1 / 6 + y * (1 / 120 + y * (-1 / 5040 + y / 362880)))
    cosine = 1.0 + y * (-1 / 2 + y * (1 / 24 + y * (-1 / 720 + y / 40320)))
    odd = (quarter & 1) == 1
    real = tl.where(odd, sine, cosine)
    imaginary = tl.where(odd, cosine, sine)
    return tl.where(((quarter + 1) & 2) == 2, -real, real), tl.where((quarter & 2) == 2, -imaginary, imaginary)


class Angles(NamedTuple):
    """Tables of cos and sin, or rates (frequencies in fixed point), and the tokens' positions; None where not given."""

    cos: Any
    sin: Any
    rates: Any
    positions: Any


class AngleStrides(NamedTuple):
    table_batch: Any
    table_row: Any
    positions_batch: Any
    positions_seq: Any


@triton.jit
def token_cos_sin(
    angles, strides, batch, seq_index, table_rows, scaling,
    HALF: tl.constexpr, PAIRS: tl.constexpr, TABLE_STEP: tl.constexpr,
):  # fmt: skip
    """(cos, sin) of one token, each [1, PAIRS]; NaN where its position is outside the table."""
    pair = tl.arange(0, PAIRS)
    inside = pair < HALF
    if angles.positions is not None:
        offset = batch * strides.positions_batch + seq_index * strides.positions_seq
        position = tl.load(angles.positions + offset).to(tl.int64)
    else:
        position = seq_index
    if angles.rates is not None:
        cosine, sine = _cos_sin(position * tl.load(angles.rates + pair, mask=inside, other=0))
        cosine *= scaling
        sine *= scaling
    else:
        if angles.positions is not None:
            inside = inside & (position >= 0) & (position < table_rows)
        offset = batch * strides.table_batch + position * strides.table_row
        cosine = tl.load(angles.cos + offset + pair * TABLE_STEP, mask=inside, other=float("nan")).to(tl.float32)
        sine = tl.load(angles.sin + offset + pair * TABLE_STEP, mask=inside, other=float("nan")).to(tl.float32)
    return cosine[None, :], sine[None, :]


@triton.jit
def load_pairs(source, inside, HALF: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The two members of each pair, [HEADS, PAIRS] each; source and inside are [HEADS, 1]."""
    if INTERLEAVED:
        both = tl.arange(0, 2 * PAIRS)[None, :]
        values = tl.load(source + both, mask=inside & (both < 2 * HALF), other=0.0)
        first, second = tl.split(tl.reshape(values, (source.shape[0], PAIRS, 2)))
    else:
        pair = tl.arange(0, PAIRS)[None, :]
        first = tl.load(source + pair, mask=inside & (pair < HALF), other=0.0)
        second = tl.load(source + HALF + pair, mask=inside & (pair < HALF), other=0.0)
    return first, second


@triton.jit
def rotate_pairs(first, second, cosine, sine):
    """The pairs (first, second) rotated by their angles, in float32."""
    a = first.to(tl.float32)
    b = second.to(tl.float32)
    return a * cosine - b * sine, b * cosine + a * sine


@triton.jit
def store_pairs(
    target, inside, first, second, HALF: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr
):  # fmt: skip
    """The reverse of `load_pairs`; both members have the target's dtype."""
    if INTERLEAVED:
        both = tl.arange(0, 2 * PAIRS)[None, :]
        tl.store(target + both, tl.interleave(first, second), mask=inside & (both < 2 * HALF))
    else:
        pair = tl.arange(0, PAIRS)[None, :]
        tl.store(target + pair, first, mask=inside & (pair < HALF))
        tl.store(target + HALF + pair, second, mask=inside & (pair < HALF))
