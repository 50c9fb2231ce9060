"""What a cache's pages are used for, and how much of them holds no token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flashkernel.kvcache.pool import EMPTY_PAGE, PagePool


@dataclass(frozen=True)
class Usage:
    """Pages by state, and the tokens in those in use; a page that several sequences share counts once.

    Args:
        pages: pages that can be allocated.
        in_use: pages that sequences reference.
        idle: unreferenced pages whose content can be found again (prefix caching).
        free: pages without content.
        tokens: tokens in the pages in use.
        page_size: tokens per page.

    Returns:
        What `KVCache.usage()` gives.

    Example:
        >>> from flashkernel.kvcache import KVCache
        >>> cache = KVCache(8, 16, max_num_seqs=2, max_model_len=64)
        >>> cache.grow(cache.add(), 20)
        >>> cache.usage().tokens, cache.usage().in_use, cache.usage().waste
        (20, 2, 0.375)
    """

    pages: int
    in_use: int
    idle: int
    free: int
    tokens: int
    page_size: int

    @property
    def waste(self) -> float:
        """The fraction of the slots in use that hold no token."""
        slots = self.in_use * self.page_size
        return 1 - self.tokens / slots if slots else 0.0


def measure(pool: PagePool, tables: list[np.ndarray], lengths: list[int]) -> Usage:
    """Usage of a pool whose sequences have these page tables (each cut to its pages) and lengths."""
    size = pool.page_size
    filled = np.zeros(pool.pages, dtype=np.int64)
    for table, length in zip(tables, lengths):
        if not table.size:
            continue
        filled[table[:-1]] = size
        last = table[-1]
        filled[last] = max(filled[last], length - (table.size - 1) * size)
    filled[EMPTY_PAGE] = 0  # it stands for pages that a window has released
    idle = pool.index.idle
    return Usage(pool.pages - 1, pool.in_use, idle, pool.free, int(filled.sum()), size)
