"""Which page holds which content: an index of full pages by the hash of everything up to their end.

A page's digest chains that of the page before it, so two equal digests mean equal tokens from the start of the
sequence on, and equal keys and values with them. The digest has 128 bits: a collision is not to be expected.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import numpy as np

DIGEST_BYTES = 16


def first_digest(salt: bytes | str) -> bytes:
    """Where a chain begins; sequences of different salts (a tenant, an adapter, an image) share nothing."""
    data = salt.encode() if isinstance(salt, str) else salt
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES, person=b"kv-pages").digest()


def next_digest(before: bytes, tokens: bytes) -> bytes:
    """The digest of a page with these tokens (the bytes of int32 numbers) that follows `before`."""
    return hashlib.blake2b(before + tokens, digest_size=DIGEST_BYTES).digest()


class PrefixIndex:
    """Registered pages by digest. Those that no sequence holds wait here, the least recently used first to go."""

    def __init__(self, pages: int) -> None:
        self.registered = np.zeros(pages, dtype=bool)
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # registered pages without a reference, oldest first

    @property
    def idle(self) -> int:
        """How many pages could be evicted."""
        return len(self._idle)

    def find(self, digest: bytes) -> int | None:
        """The page with this content, if there is one."""
        return self._page_of.get(digest)

    def register(self, digest: bytes, page: int) -> bool:
        """Let the page be found; the first page of a content stays the one that is found."""
        if digest in self._page_of or self.registered[page]:
            return False
        self._page_of[digest] = page
        self._digest_of[page] = digest
        self.registered[page] = True
        return True

    def forget(self, page: int) -> None:
        """The page is about to hold something else."""
        del self._page_of[self._digest_of.pop(page)]
        self.registered[page] = False
        self._idle.pop(page, None)

    def retire(self, pages: list[int]) -> None:
        """Nobody holds these registered pages any more; the last of them is the most recently used."""
        for page in pages:
            self._idle[page] = None

    def revive(self, pages: list[int]) -> None:
        """Somebody holds these idle pages again."""
        for page in pages:
            del self._idle[page]

    def evict(self, count: int) -> list[int]:
        """Give up the pages that were not used for longest."""
        pages: list[int] = []
        for _ in range(count):
            page, _ = self._idle.popitem(last=False)
            pages.append(page)
            self.forget(page)
        return pages
