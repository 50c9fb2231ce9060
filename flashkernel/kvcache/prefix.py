"""Prefix caching: an index of full pages by the hash of all tokens up to their end.

A page's digest is a hash of the previous page's digest and its own tokens. Equal digests mean equal tokens from the
start of the sequence on, and so equal keys and values. A digest has 128 bits: collisions are not expected.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import numpy as np

DIGEST_BYTES = 16


def first_digest(salt: bytes | str) -> bytes:
    """The digest before the first page; sequences of different salts (tenant, adapter, image) share no pages."""
    data = salt.encode() if isinstance(salt, str) else salt
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES, person=b"kv-pages").digest()


def next_digest(before: bytes, tokens: bytes) -> bytes:
    """The digest of a page with these tokens (int32, as bytes) behind a page with the digest `before`."""
    return hashlib.blake2b(before + tokens, digest_size=DIGEST_BYTES).digest()


class PrefixIndex:
    """Registered pages by digest; those that no sequence references are evicted in LRU order.

    Args:
        pages: the number of pages.

    Returns:
        An empty index. `registered` (bool, one per page) says which pages can be found.

    Example:
        >>> from flashkernel.kvcache import PrefixIndex
        >>> index = PrefixIndex(8)
        >>> index.register(b"digest", 3)
        True
        >>> index.find(b"digest")
        3
        >>> index.retire([3])  # no sequence references it any more
        >>> index.evict(1)
        [3]
    """

    def __init__(self, pages: int) -> None:
        self.registered = np.zeros(pages, dtype=bool)
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # registered pages without a reference, oldest first

    @property
    def idle(self) -> int:
        """How many pages can be evicted."""
        return len(self._idle)

    def find(self, digest: bytes) -> int | None:
        """The page with this digest, or None.

        Args:
            digest: Of the page's tokens and all tokens before them.
        """
        return self._page_of.get(digest)

    def register(self, digest: bytes, page: int) -> bool:
        """Registers a page; False where the digest has a page, or the page a digest, already.

        Args:
            digest: Of the page's tokens and all tokens before them.
            page: Its number.
        """
        if digest in self._page_of or self.registered[page]:
            return False
        self._page_of[digest] = page
        self._digest_of[page] = digest
        self.registered[page] = True
        return True

    def forget(self, page: int) -> None:
        """Removes a page whose content is about to change.

        Args:
            page: Its number.
        """
        del self._page_of[self._digest_of.pop(page)]
        self.registered[page] = False
        self._idle.pop(page, None)

    def retire(self, pages: list[int]) -> None:
        """Makes registered pages that lost their last reference evictable; the last is the most recently used.

        Args:
            pages: Their numbers.
        """
        for page in pages:
            self._idle[page] = None

    def reuse(self, pages: list[int]) -> None:
        """Takes pages that are referenced again out of the LRU order.

        Args:
            pages: Their numbers.
        """
        for page in pages:
            del self._idle[page]

    def evict(self, count: int) -> list[int]:
        """The `count` least recently used evictable pages, removed from the index.

        Args:
            count: How many.
        """
        pages: list[int] = []
        for _ in range(count):
            page, _ = self._idle.popitem(last=False)
            pages.append(page)
            self.forget(page)
        return pages
