"""A key and value cache with NaN where no query may look, and a page table with numbers of no page."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor


class UnwrittenCache(NamedTuple):
    q: Tensor  # [4, seqlen_q, 4, 64]
    lengths: Tensor
    whole: list[Tensor]  # keys and values, [4, capacity, 2, 64]
    holes: list[Tensor]  # the same with NaN and infinity behind the last key; pages, where there are any
    table: Tensor | None


def unwritten_cache(
    page: int, window: int | None, sink_tokens: int, counts: list[int], capacity: int, seqlen_q: int = 2
) -> UnwrittenCache:
    """Sequences of `counts` keys; pages that no query's window reaches any more are gone, too."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(4, seqlen_q, 4, 64, generator=generator).half()
    whole = [torch.randn(4, capacity, 2, 64, generator=generator).half() for _ in range(2)]
    holes: list[Any] = [x.clone() for x in whole]
    for b, length in enumerate(counts):
        for x in holes:
            x[b, length:] = math.nan if b % 2 else math.inf
    lengths = torch.tensor(counts, dtype=torch.int32)
    if not page:
        return UnwrittenCache(q, lengths, whole, holes, None)
    each = capacity // page
    table = torch.randperm(4 * each, generator=generator).view(4, each)
    pages = [torch.empty(4 * each, page, 2, 64).half() for _ in holes]
    for target, source in zip(pages, holes):
        target[table.flatten()] = source.view(4 * each, page, 2, 64)
    for b, length in enumerate(counts):
        table[b, -(-length // page) :] = -7
        if window is not None:  # the sinks stay
            gone = slice(-(-sink_tokens // page), max(0, length - seqlen_q + 1 - window) // page)
            for x in pages:
                x[table[b, gone]] = math.nan
            table[b, gone] = 2**31 - 1
    return UnwrittenCache(q, lengths, whole, pages, table.int())
