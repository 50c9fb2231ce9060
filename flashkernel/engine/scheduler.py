"""Which tokens of which sequences the next step computes.

Every decoding sequence gets its next token; what is left of the step's budget goes to prompts, oldest first, in chunks.
Where pages run out, the youngest sequence gives its pages back and waits at the head of the queue; its tokens are kept,
and their keys and values are computed again, or found in the cache, when it returns.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from flashkernel.engine.sequence import Sequence
from flashkernel.kvcache import KVCache, OutOfPages


@dataclass(frozen=True)
class Chunk:
    """New tokens of one sequence: `count` of them, from its `start`-th on."""

    sequence: Sequence
    start: int
    count: int

    @property
    def last(self) -> bool:
        """Whether a token can be drawn after it: the sequence has no further tokens to compute."""
        return self.start + self.count == self.sequence.total


@dataclass
class Batch:
    """One step: decoding sequences, whose one token lies on the device, and chunks of prompts."""

    decoding: list[Sequence] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)  # that were given a row in this step

    @property
    def sequences(self) -> list[Sequence]:
        return self.decoding + [chunk.sequence for chunk in self.chunks]

    @property
    def drawing(self) -> list[Sequence]:
        """The sequences that get a token."""
        return self.decoding + [chunk.sequence for chunk in self.chunks if chunk.last]

    @property
    def tokens(self) -> int:
        return len(self.decoding) + sum(chunk.count for chunk in self.chunks)


class Scheduler:
    """Queues of sequences over a cache; it decides, and moves pages, but computes nothing."""

    def __init__(self, cache: KVCache, most_sequences: int, most_tokens: int) -> None:
        self.cache, self.most_sequences, self.most_tokens = cache, most_sequences, most_tokens
        self.waiting: deque[Sequence] = deque()  # by arrival
        self.running: list[Sequence] = []  # by arrival
        self.preemptions = 0
        self._refused: tuple[Sequence, int] | None = None  # who was not admitted last, and with how many pages

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out; what it computed stays findable."""
        if sequence.row is not None:
            self._commit([sequence])
            self._release(sequence)
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def forget(self) -> None:
        """Let nothing be found in the cache any more; no sequence may run."""
        pool = self.cache.pool
        pool.release(pool.allocate(pool.available))

    def next(self) -> Batch:
        """The next step, possibly empty. Its tokens have their pages when this returns."""
        batch, before = Batch(), self.preemptions
        self._decode(batch)
        budget = self.most_tokens - len(batch.decoding)
        for sequence in list(self.running):
            if budget and not sequence.drawn and sequence.row is not None:
                budget -= self._continue(sequence, budget, batch)
        if self.preemptions == before:
            self._admit(batch, budget)
        self._commit(batch.decoding)  # not before it is sure that they are computed
        return batch

    def _decode(self, batch: Batch) -> None:
        ready = [one for one in self.running if one.drawn and one.total < one.limit]
        while ready:
            try:
                self.cache.grow(np.array([one.row for one in ready]))
                break
            except OutOfPages:
                self._preempt(self.running[-1])
                ready = [one for one in ready if one.row is not None]
        batch.decoding = ready

    def _continue(self, sequence: Sequence, budget: int, batch: Batch) -> int:
        """The next chunk of a running sequence's prompt; younger ones make room for it."""
        cache, row = self.cache, sequence.row
        assert row is not None
        start = int(cache.lengths[row])
        count = min(sequence.total - start, budget)
        while True:
            free = cache.pool.available * cache.page_size + (-start) % cache.page_size
            youngest = self.running[-1]
            if count <= free or youngest is sequence:
                break
            self._preempt(youngest)
            batch.chunks = [chunk for chunk in batch.chunks if chunk.sequence is not youngest]
            if youngest in batch.decoding:
                batch.decoding.remove(youngest)
        count = min(count, free)
        if count:
            cache.grow(row, count)
            cache.commit(row, sequence.tokens[start : start + count])
            sequence.committed = start + count
            batch.chunks.append(Chunk(sequence, start, count))
        return count

    def _admit(self, batch: Batch, budget: int) -> None:
        """Sequences that wait, in order, as long as there are rows and pages for all they have so far."""
        cache = self.cache
        while self.waiting and budget and len(self.running) < self.most_sequences:
            sequence = self.waiting[0]
            available = cache.pool.available
            if sequence.in_flight or (self.running and self._refused == (sequence, available)):
                return
            row = cache.add(sequence.tokens)
            found = int(cache.lengths[row])
            needed = -(-(sequence.total + 1) // cache.page_size) - found // cache.page_size
            spare = len(self.running)  # a page for each that runs, so that the new one is not sent back at once
            if self.running and needed + spare > cache.pool.available:
                cache.free(row)
                self._refused = (sequence, available)
                return
            self.waiting.popleft()
            sequence.row, sequence.committed = row, found
            if not sequence.preemptions:
                sequence.cached_tokens = found
            self.running.append(sequence)
            batch.admitted.append(sequence)
            budget -= self._continue(sequence, budget, batch)

    def _preempt(self, sequence: Sequence) -> None:
        self._release(sequence)
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)
        sequence.preemptions += 1
        self.preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        self.cache.free(sequence.row if sequence.row is not None else [])
        sequence.row, sequence.drawn = None, False
        self._refused = None

    def _commit(self, sequences: list[Sequence]) -> None:
        """Tell the cache the tokens that were read back since: at most one for each."""
        rows, tokens = [], []
        for one in sequences:
            if one.committed < min(len(one.tokens), int(self.cache.lengths[one.row])):
                rows.append(one.row)
                tokens.append(one.tokens[one.committed])
                one.committed += 1
        if rows:
            self.cache.commit(np.array(rows), tokens)
