"""Sequences over a pool of pages: growth, sharing, copy-on-write, prefix caching, rollback and release.

A sequence is a number, a row of the arrays below. What every step does for every sequence (`grow`, `commit`,
`truncate`) takes many sequences at once and costs a few array operations; Python loops run only over sequences that
need a page, fill one or share one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from flashkernel.kvcache.pool import EMPTY_PAGE, OutOfPages, PagePool
from flashkernel.kvcache.prefix import first_digest, next_digest
from flashkernel.kvcache.usage import Usage, measure

Rows = int | Sequence[int] | np.ndarray  # one sequence, or several, none twice
Tokens = Sequence[int] | np.ndarray


class OutOfSequences(RuntimeError):
    """All rows for sequences are in use; nothing was changed."""


class Storage(Protocol):
    """The memory behind the pages, as far as the cache needs it."""

    pages: int
    page_size: int

    def copy_pages(self, sources: np.ndarray, targets: np.ndarray) -> None: ...


class KVCache:
    """The page tables of sequences over a pool of pages.

    Each sequence has ceil(length / page_size) pages. `grow` adds room for new tokens, whose keys and values the caller
    then writes; `commit` says which tokens they are, which lets later sequences find the full pages.

    Args:
        pages: the number of pages, the empty page 0 included.
        page_size: tokens per page, a power of two up to 256.
        max_num_seqs: sequences at the same time, at most.
        max_model_len: tokens of a sequence, at most.
        window: keys that a token sees, itself included. Pages that no later token sees are released, except those of
            the sink tokens; their entries in the page table become the empty page.
        sink_tokens: the first tokens, which stay visible beside the window.
        prefix_caching: let sequences that begin alike share pages.
        storage: the memory of the pages, for copy-on-write; without it only the tables are kept.

    Returns:
        An empty cache. `page_table` (int32 [max_num_seqs, max_pages]) and `lengths` have a row for each sequence.

    Example:
        >>> from flashkernel.kvcache import KVCache
        >>> cache = KVCache(8, 4, max_num_seqs=2, max_model_len=16)
        >>> first = cache.add([1, 2, 3, 4, 5])
        >>> cache.grow(first, 5)
        >>> cache.commit(first, [1, 2, 3, 4, 5])
        >>> second = cache.add([1, 2, 3, 4, 9])  # shares the first page
        >>> int(cache.lengths[second])
        4
    """

    def __init__(
        self,
        pages: int,
        page_size: int = 16,
        *,
        max_num_seqs: int = 256,
        max_model_len: int = 8192,
        window: int | None = None,
        sink_tokens: int = 0,
        prefix_caching: bool = True,
        storage: Storage | None = None,
    ) -> None:
        if storage is not None and (storage.pages, storage.page_size) != (pages, page_size):
            raise ValueError(
                f"kvcache: the storage has {storage.pages} pages of {storage.page_size}; the cache was to have "
                f"{pages} of {page_size}"
            )
        if window is not None and window < 1:
            raise ValueError(f"kvcache: window is {window}; a token sees at least itself")
        self.pool = PagePool(pages, page_size)
        self.page_size = page_size
        self._shift = page_size.bit_length() - 1
        self.window, self.sink_pages = window, -(-sink_tokens // page_size)
        self.prefix_caching, self.storage = prefix_caching, storage
        self.max_num_seqs, self.max_model_len = max_num_seqs, max_model_len
        self.max_pages = -(-max_model_len // page_size)
        self.page_table = np.zeros((max_num_seqs, self.max_pages), dtype=np.int32)
        self.lengths = np.zeros(max_num_seqs, dtype=np.int32)
        self.page_counts = np.zeros(max_num_seqs, dtype=np.int32)
        self.versions = np.zeros(max_num_seqs, dtype=np.int64)  # of a row's page table, never the same twice
        self._version = 0
        self._alive = np.zeros(max_num_seqs, dtype=bool)
        self._unused = deque(range(max_num_seqs))
        self._released = np.zeros(max_num_seqs, dtype=np.int32)  # pages from sink_pages up to this one are released
        # The system backs this array with memory only where tokens are written.
        self._tokens = np.zeros((max_num_seqs, max_model_len if prefix_caching else 0), dtype=np.int32)
        self._committed = np.zeros(max_num_seqs, dtype=np.int32)
        self._digests: list[list[bytes]] = [[] for _ in range(max_num_seqs)]  # the chain's start, then one a page
        self._digested = np.zeros(max_num_seqs, dtype=np.int32)  # full pages that have a digest
        self._checked: bytes | None = None  # the sequences, as bytes, that were last found to exist

    def add(self, tokens: Tokens = (), *, salt: bytes | str = b"") -> int:
        """Adds a sequence and returns its number.

        It begins with the cached pages that hold the start of `tokens`; `lengths` says how many tokens that is, always
        at least one fewer than were given, so that there is one left to compute. The other tokens are not stored.

        Args:
            tokens: the prompt, int32 numbers.
            salt: sequences of different salts (tenant, adapter, image) share no pages.
        """
        given = np.asarray(tokens, dtype=np.int32)
        pages, digests = self._find(given, salt)
        row = self._new_row()
        found = len(pages)
        if found:
            self.pool.share(np.array(pages, dtype=np.int32))
            self.page_table[row, :found] = pages
            self._tokens[row, : found * self.page_size] = given[: found * self.page_size]
        self.page_counts[row] = self._digested[row] = found
        self.lengths[row] = self._committed[row] = found * self.page_size
        self._digests[row] = digests
        self._released[row] = self.sink_pages
        return row

    def match(self, tokens: Tokens, *, salt: bytes | str = b"") -> int:
        """How many of `tokens` `add` would find in cached pages made with the same `salt`.

        Args:
            tokens: Token ids of a prompt.
            salt: As `add` takes it: pages of another salt are not found.
        """
        return len(self._find(np.asarray(tokens, dtype=np.int32), salt)[0]) * self.page_size

    def grow(self, sequences: Rows, count: int | Tokens = 1) -> None:
        """Adds room for `count` more tokens to each sequence; a shared page is copied before it is written.

        Raises OutOfPages, with nothing changed, where the pool has not enough pages for all of them together.

        Args:
            sequences: one sequence or several.
            count: tokens, one number for all or one each.
        """
        rows = self._rows(sequences)
        old = self.lengths[rows]
        counts = count if isinstance(count, int) else np.asarray(count, dtype=np.int32)
        new = old + counts
        if np.count_nonzero((new < old) | (new > self.max_model_len)):
            raise ValueError(
                f"kvcache: sequences of {old.tolist()} tokens cannot grow to {new.tolist()}; they grow by 0 or more, "
                f"to at most {self.max_model_len}"
            )
        have = self.page_counts[rows]
        more = ((new + (self.page_size - 1)) >> self._shift) - have
        needed = int(more.sum())
        copies, overwritten = self._first_pages(rows, old, new)
        behind = self._behind_window(rows, old)
        pool = self.pool
        gained = 0 if behind is None else pool.count_freed(self.page_table[behind])
        if needed + len(copies) > pool.available + gained:
            raise OutOfPages(needed + len(copies), pool.available + gained)
        if behind is not None:
            self._release_behind(rows, old, behind)
        if needed + len(copies):
            pages = pool.allocate(needed + len(copies))
            self._attach(rows, have, more, pages[:needed])
            if copies:
                self._copy(copies, pages[needed:])
        for page in overwritten:
            pool.forget(page)
        self.lengths[rows] = new

    def commit(self, sequences: Rows, tokens: Tokens) -> None:
        """Says which tokens each sequence has grown by, and lets later sequences find the full pages.

        Their keys and values must be written before a kernel that is launched later reads them.

        Args:
            sequences: one sequence or several.
            tokens: (n,) for one sequence, (batch,) or (batch, n) for several.
        """
        rows = self._rows(sequences)
        given = np.asarray(tokens, dtype=np.int32)
        if not rows.size or given.size % rows.size:
            raise ValueError(
                f"kvcache: {given.size} tokens cannot be committed to {rows.size} sequences, as many to each"
            )
        given = given.reshape(rows.size, -1)
        known = self._committed[rows]
        after = known + given.shape[1]
        if (after > self.lengths[rows]).any():
            raise ValueError("kvcache: more tokens were committed than a sequence has grown by; call grow first")
        self._committed[rows] = after
        if not self.prefix_caching:
            return
        if given.shape[1] == 1:
            self._tokens[rows, known] = given[:, 0]
        else:
            self._tokens[rows[:, None], known[:, None] + np.arange(given.shape[1])] = given
        full = after >> self._shift
        for index in np.nonzero(full > self._digested[rows])[0].tolist():
            self._register(int(rows[index]), int(full[index]))

    def fork(self, sequence: int) -> int:
        """Adds a sequence with the same tokens, in the same pages until one of the two writes (copy-on-write).

        Args:
            sequence: Row of the sequence to copy.
        """
        (source,) = self._rows(sequence).tolist()
        row = self._new_row()
        count = self.page_counts[source]
        pages = self.page_table[source, :count]
        self.pool.share(pages[pages != EMPTY_PAGE])
        self.page_table[row, :count] = pages
        for state in (self.lengths, self.page_counts, self._released, self._committed, self._digested):
            state[row] = state[source]
        if self.prefix_caching:
            known = self._committed[source]
            self._tokens[row, :known] = self._tokens[source, :known]
        self._digests[row] = list(self._digests[source])
        return row

    def truncate(self, sequences: Rows, lengths: int | Tokens) -> None:
        """Drops all tokens of each of `sequences` from `lengths` on, such as those of a rejected draft.

        Args:
            sequences: Rows.
            lengths: Tokens to keep: one number for all, or one for each.
        """
        rows = self._rows(sequences)
        target = np.zeros(rows.size, dtype=np.int32) + np.asarray(lengths, dtype=np.int32)
        if ((target < 0) | (target > self.lengths[rows])).any():
            raise ValueError(
                f"kvcache: sequences of {self.lengths[rows].tolist()} tokens cannot be cut to {target.tolist()}"
            )
        kept = -(-target // self.page_size)
        if self.window is not None:
            self._check_behind(rows, target)
            self._released[rows] = np.minimum(self._released[rows], np.maximum(kept, self.sink_pages))
        for index in np.nonzero(kept < self.page_counts[rows])[0].tolist():
            self._drop(int(rows[index]), int(kept[index]))
        self.lengths[rows] = target
        self._committed[rows] = np.minimum(self._committed[rows], target)
        whole = self._committed[rows] // self.page_size
        for index in np.nonzero(whole < self._digested[rows])[0].tolist():
            row = int(rows[index])
            self._digested[row] = whole[index]
            del self._digests[row][1 + int(whole[index]) :]

    def free(self, sequences: Rows) -> None:
        """Releases these sequences and their pages; committed full pages can still be found.

        Args:
            sequences: Rows.
        """
        for row in self._rows(sequences).tolist():
            self._drop(row, 0)
            self.lengths[row] = self._committed[row] = self._digested[row] = 0
            self._digests[row] = []
            self._alive[row] = False
            self._checked = None
            self._unused.append(row)

    @property
    def sequences(self) -> list[int]:
        """The numbers of all sequences."""
        return np.nonzero(self._alive)[0].tolist()

    def slots(self, sequence: int, start: int, stop: int) -> np.ndarray:
        """The slots (page * page_size + offset, int64) of the tokens [start, stop) of a sequence.

        Args:
            sequence: Row.
            start: First token.
            stop: Behind the last token.
        """
        position = np.arange(start, stop)
        pages = self.page_table[sequence, position // self.page_size].astype(np.int64)
        return pages * self.page_size + position % self.page_size

    def usage(self) -> Usage:
        """What the pages are used for; takes time in proportion to the pages in use."""
        rows = self.sequences
        tables = [self.page_table[row, : self.page_counts[row]] for row in rows]
        return measure(self.pool, tables, self.lengths[rows].tolist())

    def waste(self) -> float:
        """The fraction of the slots in use that hold no token."""
        return self.usage().waste

    def _rows(self, sequences: Rows) -> np.ndarray:
        """The sequences as an array [batch] of int64; each must exist, and be named once."""
        rows = np.asarray(sequences, dtype=np.int64).reshape(-1)
        names = rows.tobytes()
        if names == self._checked:  # the same batch as in the call before
            return rows
        if rows.size and (int(rows.min()) < 0 or int(rows.max()) >= self.max_num_seqs):
            raise ValueError(f"kvcache: sequences {rows.tolist()} are not all within 0 to {self.max_num_seqs - 1}")
        if not self._alive[rows].all():
            raise ValueError(f"kvcache: sequences {rows[~self._alive[rows]].tolist()} do not exist; add gives numbers")
        if rows.size > 1 and np.unique(rows).size < rows.size:
            raise ValueError(f"kvcache: a sequence is named twice in {rows.tolist()}")
        self._checked = names
        return rows

    def _new_row(self) -> int:
        if not self._unused:
            raise OutOfSequences(
                f"kvcache: all {self.max_num_seqs} sequences are in use; free one, or make max_num_seqs larger"
            )
        row = self._unused.popleft()
        self._alive[row] = True
        self._touch(row)
        return row

    def _touch(self, rows: int | np.ndarray) -> None:
        """Gives these rows of the page table, which have changed, new versions."""
        changed = np.atleast_1d(rows)  # [count]: one row, too, is given an array of versions
        self.versions[changed] = np.arange(self._version + 1, self._version + 1 + changed.size)
        self._version += changed.size

    def _find(self, tokens: np.ndarray, salt: bytes | str) -> tuple[list[int], list[bytes]]:
        """The pages that hold the start of `tokens`, at least one token short of all, and their chain of digests."""
        digests, pages = [first_digest(salt)], []
        if self.prefix_caching:
            data, step = tokens.tobytes(), self.page_size * tokens.itemsize
            most = min(tokens.size, self.max_model_len) * tokens.itemsize
            for end in range(step, most, step):
                digest = next_digest(digests[-1], data[end - step : end])
                page = self.pool.index.find(digest)
                if page is None:
                    break
                pages.append(page)
                digests.append(digest)
        return pages, digests

    def _first_pages(
        self, rows: np.ndarray, old: np.ndarray, new: np.ndarray
    ) -> tuple[list[tuple[int, int]], list[int]]:
        """What growth does to the partly filled pages it begins in: (row, column) of shared pages, which it copies, and
        the registered pages that only the sequence itself references, which it overwrites."""
        inside = np.nonzero(((old & (self.page_size - 1)) != 0) & (new > old))[0]
        rows, columns = rows[inside], old[inside] >> self._shift
        pages = self.page_table[rows, columns]
        special = (self.pool.references[pages] > 1) | self.pool.index.registered[pages]
        copies: list[tuple[int, int]] = []
        overwritten: list[int] = []
        if not np.count_nonzero(special):
            return copies, overwritten
        left: dict[int, int] = {}  # references, as copies take them away
        for index in np.nonzero(special)[0].tolist():
            page = int(pages[index])
            references = left.setdefault(page, int(self.pool.references[page]))
            if references > 1:
                copies.append((int(rows[index]), int(columns[index])))
                left[page] -= 1
            elif self.pool.index.registered[page]:
                overwritten.append(page)
        return copies, overwritten

    def _behind_window(self, rows: np.ndarray, old: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """(rows, columns) of the pages that no token from `old` on can see; None where there are none."""
        if self.window is None:
            return None
        first = self._released[rows]
        gone = np.maximum(old - self.window + 1, 0) // self.page_size - first
        if not (gone > 0).any():
            return None
        return _entries(rows, first, np.maximum(gone, 0))

    def _release_behind(self, rows: np.ndarray, old: np.ndarray, behind: tuple[np.ndarray, np.ndarray]) -> None:
        assert self.window is not None
        self.pool.release(self.page_table[behind])
        self.page_table[behind] = EMPTY_PAGE
        self._released[rows] = np.maximum(self._released[rows], (old - self.window + 1) // self.page_size)
        self._touch(behind[0])

    def _check_behind(self, rows: np.ndarray, target: np.ndarray) -> None:
        """A truncated sequence must not need pages that the window has released."""
        assert self.window is not None
        gone, sinks = self._released[rows] * self.page_size, self.sink_pages * self.page_size
        short = (target > sinks) & (gone > sinks) & (np.maximum(target - self.window + 1, 0) < gone)
        if short.any():
            raise ValueError(
                f"kvcache: sequences {rows[short].tolist()} cannot be cut to {target[short].tolist()} tokens: of what "
                f"those see in a window of {self.window}, pages were released; cut by fewer, or free and start again"
            )

    def _attach(self, rows: np.ndarray, have: np.ndarray, more: np.ndarray, pages: np.ndarray) -> None:
        """Appends the new pages to the page tables."""
        if not pages.size:
            return
        entries = _entries(rows, have, more)
        self.page_table[entries] = pages
        self.page_counts[rows] = have + more
        self._touch(entries[0])

    def _copy(self, copies: list[tuple[int, int]], targets: np.ndarray) -> None:
        rows, columns = (np.array(side) for side in zip(*copies))
        sources = self.page_table[rows, columns]
        if self.storage is not None:
            self.storage.copy_pages(sources, targets)
        self.page_table[rows, columns] = targets
        self.pool.release(sources)
        self._touch(rows)

    def _drop(self, row: int, kept: int) -> None:
        """Releases a sequence's pages from number `kept` on."""
        count = int(self.page_counts[row])
        pages = self.page_table[row, kept:count]
        used = pages[pages != EMPTY_PAGE]
        if used.size:
            self.pool.release(used[::-1])  # the end of a prefix is evicted first: its start serves without it
        pages[:] = EMPTY_PAGE
        self.page_counts[row] = kept
        self._touch(row)

    def _register(self, row: int, last: int) -> None:
        """Registers the first `last` pages, whose tokens are known now, in the prefix index."""
        size, digests = self.page_size, self._digests[row]
        first = int(self._digested[row])
        tokens = self._tokens[row, first * size : last * size].tobytes()
        step = size * self._tokens.itemsize
        for number, page in enumerate(self.page_table[row, first:last].tolist()):
            digests.append(next_digest(digests[-1], tokens[number * step : (number + 1) * step]))
            if page != EMPTY_PAGE:
                self.pool.index.register(digests[-1], page)
        self._digested[row] = last


def _entries(rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(rows, columns) of the page table's entries: `counts` of each row from `starts` on."""
    some = np.nonzero(counts)[0]
    rows, starts, counts = rows[some], starts[some], counts[some]
    if not np.count_nonzero(counts > 1):
        return rows, starts
    row = np.repeat(rows, counts)
    before = np.repeat(np.cumsum(counts) - counts, counts)  # how many entries earlier rows have
    return row, np.repeat(starts, counts) + np.arange(row.size) - before
