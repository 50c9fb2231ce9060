"""A pool of pages with reference counts. It knows page numbers only; the memory behind them is the storage's."""

from __future__ import annotations

import numpy as np

from flashkernel.kvcache.prefix import PrefixIndex

EMPTY_PAGE = 0  # never handed out, never written: what page tables hold where a sequence has no page
LARGEST_PAGE = 256


class OutOfPages(RuntimeError):
    """More pages were asked for than can be had; nothing was changed."""

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(
            f"kvcache: {needed} pages are needed and {available} are available; free or preempt a sequence, "
            "or make the pool larger"
        )
        self.needed = needed
        self.available = available

    def __reduce__(self) -> tuple[type, tuple[int, int]]:
        return type(self), (self.needed, self.available)


class PagePool:
    """Pages 1 to pages - 1, each free, idle (free, but its content can still be found) or held by references."""

    def __init__(self, pages: int, page_size: int = 16) -> None:
        if page_size < 1 or page_size > LARGEST_PAGE or page_size & (page_size - 1):
            raise ValueError(f"kvcache: page_size is {page_size}; it must be a power of two from 1 to {LARGEST_PAGE}")
        if pages < 2:
            raise ValueError(f"kvcache: a pool of {pages} pages has none to hand out; page 0 is kept empty")
        self.pages = pages
        self.page_size = page_size
        self.references = np.zeros(pages, dtype=np.int32)
        self.references[EMPTY_PAGE] = 1
        self.index = PrefixIndex(pages)
        self._free = np.arange(pages - 1, -1, -1, dtype=np.int32)  # a stack, its top at the end of the counted part
        self._free_count = pages - 1

    @property
    def available(self) -> int:
        """How many pages `allocate` can give: the free ones and those that can be evicted."""
        return self._free_count + self.index.idle

    @property
    def free(self) -> int:
        """Pages without content."""
        return self._free_count

    @property
    def in_use(self) -> int:
        """Pages that somebody holds."""
        return self.pages - 1 - self.available

    def allocate(self, count: int) -> np.ndarray:
        """Pages (int32) with one reference each: free ones first, then those that were not used for longest."""
        if count > self.available:
            raise OutOfPages(count, self.available)
        taken = min(count, self._free_count)
        pages = self._free[self._free_count - taken : self._free_count][::-1].copy()
        self._free_count -= taken
        if taken < count:
            pages = np.concatenate((pages, np.array(self.index.evict(count - taken), dtype=np.int32)))
        self.references[pages] = 1
        return pages

    def share(self, pages: np.ndarray) -> None:
        """One more reference to each page; each is held already, or idle."""
        lost = pages[(self.references[pages] == 0) & ~self.index.registered[pages]]
        if lost.size:
            raise RuntimeError(f"kvcache: pages {lost.tolist()} are free and cannot be shared")
        idle = pages[self.references[pages] == 0]
        if idle.size:
            self.index.revive(list(dict.fromkeys(idle.tolist())))
        np.add.at(self.references, pages, 1)

    def release(self, pages: np.ndarray) -> None:
        """One reference less to each page; those without any become free, or idle in the order given."""
        if (pages == EMPTY_PAGE).any():
            raise RuntimeError("kvcache: the empty page belongs to nobody and cannot be released")
        np.subtract.at(self.references, pages, 1)
        left = self.references[pages]
        if (left < 0).any():
            np.add.at(self.references, pages, 1)
            raise RuntimeError(f"kvcache: pages {pages[left < 0].tolist()} were released more often than held")
        gone = pages[left == 0]
        if not gone.size:
            return
        if gone.size > 1:
            gone = np.array(list(dict.fromkeys(gone.tolist())), dtype=np.int32)  # a page given twice goes once
        known = self.index.registered[gone]
        plain = gone[~known]
        self._free[self._free_count : self._free_count + plain.size] = plain
        self._free_count += plain.size
        if plain.size < gone.size:
            self.index.retire(gone[known].tolist())

    def forget(self, page: int) -> None:
        """The content of a page that is held will change: it can be found no longer."""
        self.index.forget(page)
