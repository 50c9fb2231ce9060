"""Dropout of probabilities by a hash of the pair; flashkernel/blocks/dropout.py has the same in torch."""

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
def load_seed(dropout):
    """The seed as one scrambled word: the host's, or that of the number that was drawn on the device."""
    if dropout.device_seed is not None:
        number = tl.load(dropout.device_seed)
        low, high = number.to(tl.uint32), (number >> 32).to(tl.uint32)
        return _scramble(_scramble((low + 0x9E3779B9).to(tl.uint32)) ^ high)
    else:
        return dropout.seed


@triton.jit
def keep(seed, at, sizes, threshold):
    """Whether each pair is kept; `seed` is a scrambled 32-bit word, `threshold` the probability times 2^32."""
    index = ((at.b * sizes.heads + at.h) * sizes.seqlen_q + at.q).to(tl.int64) * sizes.seqlen_k + at.k
    outer = _scramble((index >> 32).to(tl.uint32) ^ seed.to(tl.uint32))
    return _scramble(index.to(tl.uint32) ^ outer).to(tl.int64) >= threshold
