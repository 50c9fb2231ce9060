"""Dropout of attention weights by a hash of the pair; flashkernel/blocks/dropout.py has the same in torch."""

import triton
import triton.language as tl


@triton.jit
def _scramble(word):
    word ^= word >> 16
    word = (word * 0x85EBCA6B).to(tl.uint32)
    word ^= word >> 13
    word = (word * 0xC2B2AE35).to(tl.uint32)
    return word ^ (word >> 16)


@triton.jit
def seed_word(seed, DRAWN: tl.constexpr):
    """A seed as one scrambled word: the host's, or of the number that was drawn on the device."""
    if DRAWN:
        number = tl.load(seed)
        low, high = number.to(tl.uint32), (number >> 32).to(tl.uint32)
        return _scramble(_scramble((low + 0x9E3779B9).to(tl.uint32)) ^ high)
    else:
        return seed


@triton.jit
def keep(seed, b, h, q, k, heads, queries, keys, threshold):
    """Whether each pair is kept; `seed` is a scrambled 32-bit word, `threshold` the probability times 2^32."""
    index = ((b * heads + h) * queries + q).to(tl.int64) * keys + k
    outer = _scramble((index >> 32).to(tl.uint32) ^ seed.to(tl.uint32))
    return _scramble(index.to(tl.uint32) ^ outer).to(tl.int64) >= threshold
