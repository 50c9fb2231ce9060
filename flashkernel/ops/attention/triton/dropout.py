"""Dropout of probabilities by a hash of the pair; flashkernel/blocks/dropout.py has the same in torch."""

import triton
import triton.language as tl

from flashkernel.blocks.dropout_triton import keep_elements, seed_word


@triton.jit
def load_seed(dropout):
    """The seed as one scrambled word: the host's, or that of the number that was drawn on the device."""
    return seed_word(dropout.seed, dropout.device_seed)


@triton.jit
def keep(seed, at, sizes, threshold):
    """Whether each pair is kept; `seed` is a scrambled 32-bit word, `threshold` the probability times 2^32."""
    index = ((at.b * sizes.heads + at.h) * sizes.seqlen_q + at.q).to(tl.int64) * sizes.seqlen_k + at.k
    return keep_elements(seed, index, threshold)
