"""Pages that several sequences share: prefixes that are found again, forks, and copies before a write."""

from __future__ import annotations

import numpy as np
from fake_memory import Memory

from flashkernel.kvcache import KVCache


def test_a_prefix_is_stored_once() -> None:
    """64 sequences of a shared 1024-token prompt: its pages exist once, and only the rest is left to compute."""
    cache = KVCache(1024, 16, max_num_seqs=64)
    prompt = np.arange(1024) % 311
    first = cache.add([*prompt, 5])
    assert cache.lengths[first] == 0
    cache.grow(first, 1025)
    cache.commit(first, [*prompt, 5])
    for number in range(63):
        row = cache.add([*prompt, number, 9])
        assert cache.lengths[row] == 1024
        assert cache.page_table[row, :64].tolist() == cache.page_table[first, :64].tolist()
        cache.grow(row, 2)
    assert cache.pool.in_use == 64 + 64


def test_a_prefix_is_found_again_after_its_sequence_is_gone_and_evicted_by_age() -> None:
    cache = KVCache(9, 4)
    old, young = [1] * 8, [2] * 8
    for tokens in (old, young):
        row = cache.add(tokens)
        cache.grow(row, 8)
        cache.commit(row, tokens)
        cache.free(row)
    assert cache.match([*old, 0]) == cache.match([*young, 0]) == 8
    row = cache.add()
    cache.grow(row, 4 * 5)  # four free pages and the one that was not used for longest: the end of `old`
    assert cache.match([*old, 0]) == 4
    assert cache.match([*young, 0]) == 8
    used = cache.add([*old, 0])  # being used makes it young
    cache.free(used)
    cache.grow(row, 4)
    assert cache.match([*old, 0]) == 4
    assert cache.match([*young, 0]) == 4


def test_at_least_one_token_is_left_to_compute() -> None:
    cache = KVCache(9, 4)
    row = cache.add([3] * 8)
    cache.grow(row, 8)
    cache.commit(row, [3] * 8)
    assert cache.lengths[cache.add([3] * 8)] == 4
    assert cache.lengths[cache.add([3] * 9)] == 8
    assert cache.lengths[cache.add([3] * 4)] == 0
    assert cache.lengths[cache.add([])] == 0


def test_salt_and_uncommitted_tokens_are_not_shared() -> None:
    cache = KVCache(20, 4)
    row = cache.add([1] * 9, salt="a")
    cache.grow(row, 9)
    assert cache.match([1] * 9, salt="a") == 0, "nothing was committed"
    cache.commit(row, [1] * 7)
    assert cache.match([1] * 9, salt="a") == 4, "the second page is not full"
    cache.commit(row, [1, 1])
    assert cache.match([1] * 9, salt="a") == 8
    assert cache.match([1] * 9, salt="b") == cache.match([1] * 9) == 0
    assert KVCache(20, 4, prefix_caching=False).match([1] * 9) == 0


def test_without_prefix_caching_nothing_is_kept() -> None:
    cache = KVCache(20, 4, prefix_caching=False)
    row = cache.add([1] * 9)
    cache.grow(row, 9)
    cache.commit(row, [1] * 9)
    cache.free(row)
    assert cache.pool.free == 19
    assert cache.lengths[cache.add([1] * 9)] == 0


def test_fork_shares_until_one_writes() -> None:
    memory = Memory(5, 4)  # with no page to spare: a third copy would not fit
    cache = KVCache(5, 4, storage=memory)
    row = cache.add()
    cache.grow(row, 6)
    memory.held.reshape(-1)[cache.slots(row, 0, 6)] = np.arange(6) + 1
    children = [cache.fork(row), cache.fork(row)]
    assert cache.pool.in_use == 2
    cache.grow([row, *children])  # the last of the three keeps the page, the others copy it
    assert cache.pool.in_use == 4
    assert len(set(cache.page_table[[row, *children], 1].tolist())) == 3
    for each in (row, *children):
        assert memory.held.reshape(-1)[cache.slots(each, 0, 6)].tolist() == [1, 2, 3, 4, 5, 6]
    cache.free([row, *children])
    assert cache.pool.in_use == 0


def test_a_shared_page_behind_all_windows_makes_room_for_the_sequences_that_leave_it() -> None:
    """Both give up the first page in the step in which they need one each, and one page is free."""
    cache = KVCache(4, 4, max_num_seqs=2, window=4, prefix_caching=False)
    first = cache.add()
    cache.grow(first, 8)
    rows = [first, cache.fork(first)]
    cache.grow(rows)
    assert cache.page_table[rows, 0].tolist() == [0, 0]
    assert sorted(cache.page_table[rows, 2].tolist()) == [1, 3]
    assert cache.pool.available == 0


def test_a_findable_page_is_not_overwritten_behind_the_index() -> None:
    cache = KVCache(20, 4)
    row = cache.add([1] * 8)
    cache.grow(row, 8)
    cache.commit(row, [1] * 8)
    cache.truncate(row, 6)
    assert cache.match([1] * 9) == 8, "nothing was written yet"
    cache.grow(row, 1)
    assert cache.match([1] * 9) == 4
