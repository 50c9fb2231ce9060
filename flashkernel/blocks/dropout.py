"""Dropout from a counter: whether a pair is kept follows from a seed and the pair's number alone.

No state is carried and nothing is stored: the forward and the backward pass, a reference and a kernel with any tiling
decide alike. The arithmetic is that of 32-bit unsigned integers; torch has no such type to multiply in, so it is done
in 64 bits and cut off.

    index = ((b * heads + h) * seqlen_q + q) * seqlen_k + k                   64 bits
    hash  = scramble(low word ^ scramble(high word ^ seed_word(seed)))   32 bits
    kept  = hash >= threshold(probability)
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
FIRST, SECOND = 0x85EBCA6B, 0xC2B2AE35  # the odd factors of MurmurHash3's finalizer
START = 0x9E3779B9  # so that seed 0 does not leave pair 0 at hash 0
Word = TypeVar("Word", Tensor, int)


def scramble(word: Word) -> Word:
    """A bijection of 32-bit words in which every bit of the input touches every bit of the output."""
    word = word ^ (word >> 16)
    word = (word * FIRST) & WORD
    word = word ^ (word >> 13)
    word = (word * SECOND) & WORD
    return word ^ (word >> 16)


def seed_word(seed: Word) -> Word:
    """The seed, of up to 64 bits, as one scrambled word."""
    low, high = seed & WORD, (seed >> 32) & WORD
    return scramble(scramble((low + START) & WORD) ^ high)


def threshold(probability: float) -> int:
    """Hashes below it are dropped: their share is `probability`."""
    return min(WORD, int(probability * 2.0**32))


def draw_seed(device: torch.device) -> Tensor:
    """A seed from torch's generator of the device, int64 and left there: nothing waits, torch.manual_seed and
    activation checkpointing repeat it, and a CUDA graph draws another at each replay."""
    return torch.randint(2**63 - 1, (), device=device)


def check_dropout(function: str, dropout: float, seed: int | Tensor | None, device: torch.device) -> None:
    """ValueError for a share that is no probability, or a seed that is no number."""
    if not 0 <= dropout < 1:
        raise ValueError(f"{function}: dropout is {dropout}; it must be a probability, at least 0 and below 1")
    if isinstance(seed, Tensor) and (seed.numel() != 1 or seed.dtype != torch.int64 or seed.device != device):
        raise ValueError(
            f"{function}: seed is {seed.dtype} {tuple(seed.shape)} on {seed.device}; it must be a number, or one int64 "
            f"on {device}"
        )


def keep_pairs(
    seed: int | Tensor,
    b: Tensor,
    h: Tensor,
    q: Tensor,
    k: Tensor,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
    probability: float,
) -> Tensor:
    """Which of the pairs at these indices are kept: bool, of the shape the index tensors broadcast to."""
    index = ((b * heads + h) * seqlen_q + q) * seqlen_k + k
    # In a graph a seed may be a symbol, whose scrambling no compiler should have to carry: there, a tensor.
    if torch.compiler.is_compiling() and not isinstance(seed, Tensor):
        seed = index.new_full((), seed)
    return hash_elements(seed, index) >= threshold(probability)


def hash_elements(seed: int | Tensor, index: Tensor) -> Tensor:
    """A hash of 32 bits for each number of `index`, int64."""
    word = seed_word(seed)  # type: ignore[type-var]
    outer = scramble((index >> 32) ^ word)
    return scramble((index & WORD) ^ outer)


def keep(
    seed: int | Tensor,
    batch: int,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
    probability: float,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Which pairs are kept: bool [batch, heads, seqlen_q, seqlen_k]."""
    b = torch.arange(batch, device=device).view(-1, 1, 1, 1)
    h = torch.arange(heads, device=device).view(1, -1, 1, 1)
    q = torch.arange(seqlen_q, device=device).view(1, 1, -1, 1)
    k = torch.arange(seqlen_k, device=device).view(1, 1, 1, -1)
    return keep_pairs(seed, b, h, q, k, heads, seqlen_q, seqlen_k, probability)
