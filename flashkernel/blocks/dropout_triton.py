"""Dropout by a hash of an element's number, in kernels; dropout.py has the same in torch."""

import triton
import triton.language as tl


@triton.jit
def scramble(word):
    word ^= word >> 16
    word = (word * 0x85EBCA6B).to(tl.uint32)
    word ^= word >> 13
    word = (word * 0xC2B2AE35).to(tl.uint32)
    return word ^ (word >> 16)


@triton.jit
def seed_word(seed, device_seed):
    """The seed as one scrambled word: the host's, or that of the number that was drawn on the device."""
    if device_seed is not None:
        number = tl.load(device_seed)
        low, high = number.to(tl.uint32), (number >> 32).to(tl.uint32)
        return scramble(scramble((low + 0x9E3779B9).to(tl.uint32)) ^ high)
    else:
        return tl.cast(seed, tl.uint32)


@triton.jit
def keep_elements(word, index, threshold):
    """Whether each element is kept; `word` is a `seed_word`, `index` in 64 bits, `threshold` the probability * 2^32."""
    return hash_elements(word, index).to(tl.int64) >= threshold


@triton.jit
def hash_elements(word, index):
    """A hash of 32 bits for each number of `index`, in 64 bits; `word` is a `seed_word`."""
    outer = scramble((index >> 32).to(tl.uint32) ^ word)
    return scramble(index.to(tl.uint32) ^ outer)
