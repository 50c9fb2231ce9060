"""A pool of pages with reference counts. It knows page numbers only; their memory is in `PageStorage`."""

from __future__ import annotations

import numpy as np

from flashkernel.kvcache.prefix import PrefixIndex

EMPTY_PAGE = 0  # never allocated, never written: page tables hold it where a sequence has no page
LARGEST_PAGE = 256


class OutOfPages(RuntimeError):
    """More pages are needed than are available; nothing was changed.

    Args:
        needed: pages that were asked for.
        available: pages that are free or can be evicted.
    """

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
    """Pages 1 to pages - 1 with reference counts: free, cached (unreferenced, but found by content) or in use.

    Args:
        pages: the number of pages, the empty page 0 included.
        page_size: tokens per page, a power of two up to 256.

    Returns:
        A pool whose pages are all free. `references` counts each page's references, `index` is its `PrefixIndex`.

    Example:
        >>> from flashkernel.kvcache import PagePool
        >>> pool = PagePool(8, page_size=16)
        >>> pages = pool.allocate(3)
        >>> pool.share(pages[:1])  # a second sequence uses the first page
        >>> pool.release(pages)
        >>> pool.in_use, pool.available
        (1, 6)
    """

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
        """How many pages `allocate` can return: those free and those that can be evicted."""
        return self._free_count + self.index.idle

    @property
    def free(self) -> int:
        """Pages without content."""
        return self._free_count

    @property
    def in_use(self) -> int:
        """Pages that sequences reference."""
        return self.pages - 1 - self.available

    def allocate(self, count: int) -> np.ndarray:
        """`count` pages (int32) with one reference each: free ones first, then the least recently used cached ones.

        Args:
            count: How many.
        """
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
        """Adds a reference to each of `pages`; each is in use or cached.

        Args:
            pages: Int32 page numbers.
        """
        lost = pages[(self.references[pages] == 0) & ~self.index.registered[pages]]
        if lost.size:
            raise RuntimeError(f"kvcache: pages {lost.tolist()} are free and cannot be shared")
        idle = pages[self.references[pages] == 0]
        if idle.size:
            self.index.reuse(list(dict.fromkeys(idle.tolist())))
        np.add.at(self.references, pages, 1)

    def release(self, pages: np.ndarray) -> None:
        """Removes a reference from each of `pages`; unreferenced ones become free, or cached in the order given.

        Args:
            pages: Int32 page numbers.
        """
        if (pages == EMPTY_PAGE).any():
            raise RuntimeError("kvcache: the empty page belongs to nobody and cannot be released")
        np.subtract.at(self.references, pages, 1)
        left = self.references[pages]
        if (left < 0).any():
            np.add.at(self.references, pages, 1)
            raise RuntimeError(f"kvcache: pages {pages[left < 0].tolist()} were released more often than held")
        unused = pages[left == 0]
        if not unused.size:
            return
        if unused.size > 1:
            unused = np.array(list(dict.fromkeys(unused.tolist())), dtype=np.int32)  # a page given twice counts once
        registered = self.index.registered[unused]
        freed = unused[~registered]
        self._free[self._free_count : self._free_count + freed.size] = freed
        self._free_count += freed.size
        if freed.size < unused.size:
            self.index.retire(unused[registered].tolist())

    def count_freed(self, pages: np.ndarray) -> int:
        """How many pages `release` would make available: those whose references are all among `pages`.

        Args:
            pages: Int32 page numbers, one as often as references of it are to be removed.
        """
        each, times = np.unique(pages, return_counts=True)
        return int((self.references[each] == times).sum())

    def forget(self, page: int) -> None:
        """Removes a page from the prefix index, because its content is about to change.

        Args:
            page: Its number.
        """
        self.index.forget(page)
