"""The scheduler: which tokens of which sequences the next step computes.

Every decoding sequence gets its next token. The rest of `max_num_batched_tokens` goes to prompts, oldest first, in
chunks (chunked prefill). If blocks run out, the youngest sequence is preempted: it returns its blocks and waits at the
head of the queue. Its tokens are kept; their keys and values are found in the prefix cache or recomputed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from flashkernel.engine.sequence import Sequence
from flashkernel.kvcache import KVCache, OutOfPages


@dataclass(frozen=True)
class PrefillChunk:
    """Tokens `start` to `start + count - 1` of a sequence, to be computed in one step; the last ones may be a draft."""

    sequence: Sequence
    start: int
    count: int
    draft: tuple[int, ...] = ()

    @property
    def is_last(self) -> bool:
        """Whether the sequence has no further tokens to compute, so that a token is sampled after this chunk."""
        return self.start + self.count - len(self.draft) == self.sequence.num_tokens

    @property
    def num_logits(self) -> int:
        """Tokens after which one is sampled: the last one, and those of a draft."""
        return 1 + len(self.draft) if self.is_last else 0

    @property
    def scored(self) -> range:
        """Positions after which the log probability of the prompt's next token is wanted."""
        if not self.sequence.scores_prompt:
            return range(0)
        first = max(self.start, len(self.sequence.prompt_logprobs) - 1)
        return range(first, max(first, min(self.start + self.count, self.sequence.num_prompt_tokens - 1)))

    @property
    def token_ids(self) -> list[int]:
        """The tokens to compute."""
        end = self.start + self.count - len(self.draft)
        return [*self.sequence.token_ids[self.start : end], *self.draft]


@dataclass
class SchedulerOutput:
    """One step: decoding sequences with one token each, whose ids are on the device, and prefill chunks."""

    decodes: list[Sequence] = field(default_factory=list)
    prefills: list[PrefillChunk] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)  # sequences that were given a row in this step

    @property
    def sequences(self) -> list[Sequence]:
        """All sequences of the step, in the order of their tokens."""
        return self.decodes + [chunk.sequence for chunk in self.prefills]

    @property
    def sampled(self) -> list[Sequence]:
        """The sequences that a token is sampled for; one with a draft comes once for each of its tokens."""
        return self.decodes + [chunk.sequence for chunk in self.prefills for _ in range(chunk.num_logits)]

    @property
    def assumed(self) -> list[int | None]:
        """For each of `sampled`: the token of a draft before it, which must be right for the sample to count."""
        found: list[int | None] = [None] * len(self.decodes)
        for chunk in self.prefills:
            found += [None, *chunk.draft] if chunk.is_last else []
        return found

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return len(self.decodes) + sum(chunk.count for chunk in self.prefills)


class Scheduler:
    """Queues of sequences over a KV cache. It decides and moves blocks; it computes nothing."""

    def __init__(
        self, cache: KVCache, max_num_seqs: int, max_num_batched_tokens: int, num_speculative_tokens: int = 0
    ) -> None:
        self.cache, self.max_num_seqs, self.max_num_batched_tokens = cache, max_num_seqs, max_num_batched_tokens
        self.num_speculative_tokens = num_speculative_tokens
        self.waiting: deque[Sequence] = deque()  # by arrival
        self.running: list[Sequence] = []  # by arrival
        self.num_preemptions = 0
        self._extra_rows = 0  # rows of logits of this step, beyond one for each running sequence
        self._refused: tuple[Sequence, int] | None = None  # last sequence not admitted, and the free blocks then

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence."""
        self.waiting.append(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Removes a sequence. The prefix cache keeps what it computed."""
        if sequence.row is not None:
            self._commit([sequence])
            self._release(sequence)
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def reset_prefix_cache(self) -> None:
        """Empties the prefix cache; no sequence may run."""
        pool = self.cache.pool
        pool.release(pool.allocate(pool.available))

    def schedule(self) -> SchedulerOutput:
        """The next step; it may be empty. Blocks for its tokens are allocated."""
        output, before = SchedulerOutput(), self.num_preemptions
        self._extra_rows = 0
        ready = [one for one in self.running if one.can_decode]
        drafting = [one for one in ready if one.lookup is not None] if self.num_speculative_tokens else []
        self._schedule_decodes([one for one in ready if one.lookup is None] if drafting else ready, output)
        self._schedule_drafts(drafting, output)
        budget = self.max_num_batched_tokens - output.num_tokens
        for sequence in [one for one in self.running if not one.has_sampled]:
            if budget and sequence.row is not None:
                budget -= self._schedule_prefill(sequence, budget, output)
        if self.num_preemptions == before:
            self._admit(output, budget)
        self._commit(output.decodes)  # only now is it certain that they are computed
        return output

    def _schedule_decodes(self, ready: list[Sequence], output: SchedulerOutput) -> None:
        while ready:
            try:
                self.cache.grow(np.array([one.row for one in ready]))
                break
            except OutOfPages:
                self._preempt(self.running[-1])
                ready = [one for one in ready if one.row is not None]
        output.decodes = ready

    def _schedule_drafts(self, drafting: list[Sequence], output: SchedulerOutput) -> None:
        """Schedules sequences that decode with drafts; a draft takes only blocks and rows of logits that are free."""
        cache = self.cache
        for sequence in drafting:
            row = sequence.row
            if row is None or sequence.lookup is None:  # preempted for one before it
                continue
            length = int(cache.lengths[row])
            most = min(self.num_speculative_tokens, sequence.max_tokens - sequence.num_tokens - 1, self._spare_rows)
            draft = sequence.lookup.draft(sequence.token_ids, most) if most > 0 else ()
            while self._free_slots(length) < 1 and self.running[-1] is not sequence:
                self._preempt(self.running[-1])
                output.decodes = [one for one in output.decodes if one.row is not None]
                output.prefills = [chunk for chunk in output.prefills if chunk.sequence.row is not None]
            free = self._free_slots(length)
            if free < 1:
                self._preempt(sequence)
                continue
            draft = draft[: free - 1]
            self._extra_rows += len(draft)
            cache.grow(row, 1 + len(draft))
            output.prefills.append(PrefillChunk(sequence, length, 1 + len(draft), draft))

    @property
    def _spare_rows(self) -> int:
        """Rows of logits that are left in this step, with one kept for each running sequence."""
        return self.max_num_seqs - len(self.running) - self._extra_rows

    def _free_slots(self, length: int) -> int:
        """Tokens that a sequence of this length can grow by."""
        return self.cache.pool.available * self.cache.page_size + (-length) % self.cache.page_size

    def accept(self, sequence: Sequence) -> None:
        """Drops the rejected part of a draft from the cache, and commits what was accepted."""
        if sequence.row is None or sequence.lookup is None or not sequence.has_sampled:
            return
        known = len(sequence.token_ids) - 1
        self.cache.truncate(sequence.row, known)
        if sequence.num_committed < known:
            self.cache.commit(sequence.row, sequence.token_ids[sequence.num_committed : known])
            sequence.num_committed = known

    def _schedule_prefill(self, sequence: Sequence, budget: int, output: SchedulerOutput) -> int:
        """Schedules the next chunk of a running sequence; preempts younger ones if it needs their blocks."""
        cache, row = self.cache, sequence.row
        assert row is not None
        start = int(cache.lengths[row])
        count = min(sequence.num_tokens - start, budget)
        if sequence.scores_prompt:  # a row of logits for each token
            count = min(count, 1 + self._spare_rows)
        while True:
            free = cache.pool.available * cache.page_size + (-start) % cache.page_size
            youngest = self.running[-1]
            if count <= free or youngest is sequence:
                break
            self._preempt(youngest)
            output.prefills = [chunk for chunk in output.prefills if chunk.sequence is not youngest]
            if youngest in output.decodes:
                output.decodes.remove(youngest)
        count = min(count, free)
        if count:
            cache.grow(row, count)
            cache.commit(row, sequence.token_ids[start : start + count])
            sequence.num_committed = start + count
            chunk = PrefillChunk(sequence, start, count)
            output.prefills.append(chunk)
            self._extra_rows += max(0, len(chunk.scored) + chunk.num_logits - 1)
        return count

    def _admit(self, output: SchedulerOutput, budget: int) -> None:
        """Admits waiting sequences in order, while there are rows, and blocks for all their tokens so far."""
        cache = self.cache
        while self.waiting and budget and self._spare_rows > 0:
            sequence = self.waiting[0]
            available = cache.pool.available
            if sequence.num_in_flight or (self.running and self._is_refused(sequence, available)):
                return
            row = cache.add(() if sequence.scores_prompt else sequence.token_ids)
            num_cached = int(cache.lengths[row])
            needed = -(-(sequence.num_tokens + 1) // cache.page_size) - num_cached // cache.page_size
            reserve = len(self.running)  # a block for each running sequence, or the new one is preempted at once
            if self.running and needed + reserve > cache.pool.available:
                cache.free(row)
                self._refused = (sequence, available)
                return
            self.waiting.popleft()
            sequence.row, sequence.num_committed = row, num_cached
            if not sequence.num_preemptions:
                sequence.num_cached_tokens = num_cached
            self.running.append(sequence)
            output.admitted.append(sequence)
            budget -= self._schedule_prefill(sequence, budget, output)

    def _is_refused(self, sequence: Sequence, available: int) -> bool:
        """Whether there was no room for the sequence when at least as many blocks were free: looking up the prefix of a
        long prompt takes too long for every step."""
        return self._refused is not None and self._refused[0] is sequence and available <= self._refused[1]

    def _preempt(self, sequence: Sequence) -> None:
        self._release(sequence)
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        self.cache.free(sequence.row if sequence.row is not None else [])
        sequence.row, sequence.has_sampled = None, False
        self._refused = None

    def _commit(self, sequences: list[Sequence]) -> None:
        """Gives the prefix cache the tokens that the host has read since the last step: at most one for each."""
        if not self.cache.prefix_caching:
            return
        rows, token_ids = [], []
        lengths = self.cache.lengths[np.array([one.row for one in sequences], dtype=np.int64)].tolist()
        for one, length in zip(sequences, lengths):
            if one.num_committed < length and one.num_committed < len(one.token_ids):
                rows.append(one.row)
                token_ids.append(one.token_ids[one.num_committed])
                one.num_committed += 1
        if rows:
            self.cache.commit(np.array(rows), token_ids)
