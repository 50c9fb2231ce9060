"""What a cache's pages are used for, and what share of them holds nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flashkernel.kvcache.pool import EMPTY_PAGE, PagePool


@dataclass(frozen=True)
class Usage:
    """Pages by state, and the tokens in those that sequences hold; a page held by several counts once."""

    pages: int  # that can be handed out
    in_use: int
    idle: int  # held by nobody, but their content can be found again
    free: int
    tokens: int
    page_size: int

    @property
    def waste(self) -> float:
        """The share of reserved slots that hold no token."""
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
    filled[EMPTY_PAGE] = 0  # it stands for pages that a window has given up
    idle = pool.index.idle
    return Usage(pool.pages - 1, pool.in_use, idle, pool.free, int(filled.sum()), size)
