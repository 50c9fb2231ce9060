"""Packed sequences: one behind the other in one batch, told apart by their cumulative lengths.

Query i sees the keys in [first[i], last[i]): two tables made on the device, so nothing waits for the GPU and the work
follows the documents, not the square of their sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashkernel.blocks.expression import Table
from flashkernel.blocks.mask import Mask, custom
from flashkernel.core.derived import derived


def packed_mask(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, tokens: int, left: int | None = None, right: int | None = None
) -> tuple[Mask, Tensor]:
    """The mask of packed sequences, and for each query the packed position of the key it is aligned with, [tokens].

    The last query of a sequence is aligned with its last key. Tokens behind the last sequence see nothing. Calls with
    the same lengths share the tables (core/derived.py).
    """
    first, last, diagonal = derived(
        ("packed_mask", tokens, left, right), (cu_seqlens_q, cu_seqlens_k),
        lambda of_queries, of_keys: _visible_keys(of_queries.int().contiguous(), of_keys.int(), tokens, left, right),
    )  # fmt: skip
    first_key, last_key = Table(first), Table(last)
    return custom(lambda b, h, q, k: (first_key[q] <= k) & (k < last_key[q]), "packed"), diagonal


def _visible_keys(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, tokens: int, left: int | None, right: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The first key that each query sees, the end of those it sees, and the key it is aligned with, all [tokens]."""
    token = torch.arange(tokens, dtype=torch.int32, device=cu_seqlens_q.device)
    sequence = torch.searchsorted(cu_seqlens_q, token, right=True) - 1  # [tokens]
    inside = sequence < cu_seqlens_q.shape[0] - 1
    sequence = sequence.clamp(max=cu_seqlens_q.shape[0] - 2)
    start, end = cu_seqlens_k[sequence], cu_seqlens_k[sequence + 1]
    diagonal = token + end - cu_seqlens_q[sequence + 1]
    first = start if left is None else torch.maximum(start, diagonal - left)
    last = end if right is None else torch.minimum(end, diagonal + right + 1)
    return first, torch.where(inside, last, first), diagonal
