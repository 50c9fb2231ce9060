"""The paged cache: its invariants under tens of thousands of random operations, and what each operation promises.

The walk keeps a plain model beside the cache: for every sequence the list of what its slots must hold, and a fake
device memory into which only slots given by the cache are written.
"""

from __future__ import annotations

import copy
import pickle
import time
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import flashkernel as fk
from flashkernel.kvcache import (
    EMPTY_PAGE,
    BatchTensors,
    KVCache,
    OutOfPages,
    OutOfSequences,
    PagePool,
    PageStorage,
)
from flashkernel.kvcache.storage import bytes_per_page

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Memory:
    """A fake device: one number in each slot."""

    def __init__(self, pages: int, page_size: int) -> None:
        self.pages, self.page_size = pages, page_size
        self.held = np.zeros((pages, page_size), dtype=np.int64)

    def copy_pages(self, sources: np.ndarray, targets: np.ndarray) -> None:
        assert not set(sources.tolist()) & set(targets.tolist())
        assert len(set(targets.tolist())) == len(targets)
        self.held[targets] = self.held[sources]


@dataclass
class Model:
    """What a sequence must be: its tokens, and a mark for each that depends on all tokens before it, as keys do."""

    salt: str
    tokens: list[int] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    committed: int = 0

    def append(self, token: int) -> None:
        before = self.marks[-1] if self.marks else hash(self.salt)
        self.tokens.append(token)
        self.marks.append(hash((before, token)))

    def cut(self, length: int) -> None:
        del self.tokens[length:], self.marks[length:]
        self.committed = min(self.committed, length)


class World:
    """A cache, its memory and the model of its sequences; every method is one operation with its checks."""

    def __init__(self, pages: int, page_size: int, window: int | None = None, sinks: int = 0, most: int = 8) -> None:
        self.memory = Memory(pages, page_size)
        self.cache = KVCache(
            pages, page_size, most_sequences=most, most_tokens=max(43, 10 * page_size + 3), window=window,
            sink_tokens=sinks, storage=self.memory,
        )  # fmt: skip
        self.window, self.sinks = window, sinks
        self.models: dict[int, Model] = {}
        self.refused = self.hits = self.copies = 0

    def add(self, tokens: list[int], salt: str) -> int | None:
        expected = self.cache.match(tokens, salt=salt)
        if len(self.models) == self.cache.most_sequences:
            with pytest.raises(OutOfSequences):
                self.cache.add(tokens, salt=salt)
            return None
        row = self.cache.add(tokens, salt=salt)
        assert row not in self.models
        found = int(self.cache.lengths[row])
        assert found == expected
        assert found % self.cache.page_size == 0
        assert found < max(1, len(tokens))
        model = self.models[row] = Model(salt)
        for token in tokens[:found]:
            model.append(token)
        model.committed = found
        self.hits += found > 0
        held = self.memory.held.reshape(-1)[self.cache.slots(row, 0, found)]
        assert held.tolist() == model.marks, "a prefix was found with other content"
        return row

    def grow(self, rows: list[int], counts: list[int], tokens: list[list[int]]) -> bool:
        cache = self.cache
        before = self.snapshot()
        old = [int(cache.lengths[row]) for row in rows]
        refusal = None
        try:
            cache.grow(rows, counts)
        except OutOfPages as error:
            refusal = error
        if refusal is not None:
            assert refusal.needed > refusal.available
            self.assert_unchanged(before)
            self.refused += 1
            return False
        for row, start, count, new in zip(rows, old, counts, tokens):
            for token in new[:count]:
                self.models[row].append(token)
            slots = cache.slots(row, start, start + count)
            for page in {int(slot) // cache.page_size for slot in slots}:
                holders = [other for other in self.models if page in cache.page_table[other]]
                assert holders == [row], "a page that another sequence sees would be written"
                assert cache.pool.references[page] == 1
                assert not cache.pool.index.registered[page], "a page that can be found would be written"
                assert page != EMPTY_PAGE
            self.memory.held.reshape(-1)[slots] = self.models[row].marks[start : start + count]
        for row, start, count in zip(rows, old, counts):
            if count and start % cache.page_size:  # the page it began in is another one now
                self.copies += before["held"][row] != self.page_of(row, start)
        return True

    def page_of(self, row: int, position: int) -> int:
        return int(self.cache.page_table[row, position // self.cache.page_size])

    def commit(self, row: int, count: int) -> None:
        model = self.models[row]
        count = min(count, len(model.tokens) - model.committed)
        self.cache.commit(row, model.tokens[model.committed : model.committed + count])
        model.committed += count

    def fork(self, row: int) -> int | None:
        if len(self.models) == self.cache.most_sequences:
            with pytest.raises(OutOfSequences):
                self.cache.fork(row)
            return None
        child = self.cache.fork(row)
        assert child not in self.models
        self.models[child] = copy.deepcopy(self.models[row])
        return child

    def truncate(self, row: int, length: int) -> None:
        try:
            self.cache.truncate(row, length)
        except ValueError:
            missing = self.cache.slots(row, 0, length)[self.visible(length)] < self.cache.page_size
            assert missing.any(), "only what a window has given up may keep a sequence from going back"
            return
        self.models[row].cut(length)

    def visible(self, length: int) -> list[int]:
        """What the next token may see of so many."""
        sinks = min(self.sinks, length)
        first = 0 if self.window is None else max(0, length - self.window + 1)
        return [*range(sinks), *range(max(first, sinks), length)]

    def free(self, row: int) -> None:
        self.cache.free(row)
        del self.models[row]

    def snapshot(self) -> dict:
        cache = self.cache
        last = {row: self.page_of(row, max(0, int(cache.lengths[row]) - 1)) for row in self.models}
        return {
            "held": last, "table": cache.page_table.copy(), "lengths": cache.lengths.copy(),
            "references": cache.pool.references.copy(), "available": cache.pool.available,
            "registered": cache.pool.index.registered.copy(), "memory": self.memory.held.copy(),
        }  # fmt: skip

    def assert_unchanged(self, before: dict) -> None:
        after = self.snapshot()
        for name, value in before.items():
            assert np.array_equal(value, after[name]) if isinstance(value, np.ndarray) else value == after[name], name

    def check(self) -> None:
        cache, size = self.cache, self.cache.page_size
        assert cache.sequences == sorted(self.models)
        counted = np.zeros_like(cache.pool.references)
        counted[EMPTY_PAGE] = 1
        for row, model in self.models.items():
            length, pages = int(cache.lengths[row]), int(cache.page_counts[row])
            assert length == len(model.tokens)
            assert pages == -(-length // size)
            assert (cache.page_table[row, pages:] == EMPTY_PAGE).all()
            table = cache.page_table[row, :pages]
            held = table[table != EMPTY_PAGE]
            assert len(set(held.tolist())) == held.size, "a page stands twice in one table"
            np.add.at(counted, held, 1)
            visible = self.visible(length)
            slots = cache.slots(row, 0, length)[visible]
            assert (slots >= size).all(), "a token that can be seen has no page"
            assert self.memory.held.reshape(-1)[slots].tolist() == [model.marks[place] for place in visible]
            if self.window is None:
                assert held.size == pages
        assert np.array_equal(counted, cache.pool.references), "reference counts are not the number of holders"
        self.check_pool(counted)

    def check_pool(self, counted: np.ndarray) -> None:
        pool = self.cache.pool
        free = pool._free[: pool._free_count].tolist()
        idle = list(pool.index._idle)
        held = np.nonzero(counted)[0].tolist()
        assert sorted(free + idle + held) == list(range(pool.pages)), "a page is lost, or is in two places"
        assert pool.index.registered[idle].all()
        assert not pool.index.registered[free].any()
        assert not pool.index.registered[EMPTY_PAGE]
        assert not self.memory.held[EMPTY_PAGE].any()
        assert pool.available == len(free) + len(idle)
        assert set(pool.index._digest_of) == set(np.nonzero(pool.index.registered)[0].tolist())


PROMPTS = [[number % 3 for number in range(60)], [number % 2 for number in range(60)], [7] * 60]


def _walk(world: World, operations: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    for step in range(operations):
        rows = list(world.models)
        kind = random.choice(
            ["add", "grow", "batch", "commit", "fork", "truncate", "free"],
            p=[0.14, 0.3, 0.14, 0.14, 0.06, 0.12, 0.1],
        )
        row = int(random.choice(rows)) if rows else -1
        most = world.cache.most_tokens
        if kind == "add" or not rows:
            prompt = PROMPTS[random.integers(3)][: random.integers(0, 30)] + random.integers(0, 2, 2).tolist()
            added = world.add(prompt, str(random.integers(2)))
            if added is not None:
                rest = prompt[len(world.models[added].tokens) :]
                if world.grow([added], [len(rest)], [rest]) and random.random() < 0.8:
                    world.commit(added, len(rest))
        elif kind == "grow":
            count = min(int(random.integers(0, 9)), most - len(world.models[row].tokens))
            world.grow([row], [count], [random.integers(0, 2, count).tolist()])
        elif kind == "batch":
            picked = [int(each) for each in random.permutation(rows)[: random.integers(1, len(rows) + 1)]]
            counts = [min(int(random.integers(0, 3)), most - len(world.models[each].tokens)) for each in picked]
            world.grow(picked, counts, [random.integers(0, 2, count).tolist() for count in counts])
        elif kind == "commit":
            world.commit(row, int(random.integers(0, 12)))
        elif kind == "fork":
            world.fork(row)
        elif kind == "truncate":
            world.truncate(row, int(random.integers(0, len(world.models[row].tokens) + 1)))
        else:
            world.free(row)
        if step % 4 == 0:
            world.check()
    world.check()
    for row in list(world.models):
        world.free(row)
    world.check()
    pool = world.cache.pool
    assert pool.in_use == 0
    assert sorted(pool.allocate(pool.pages - 1).tolist()) == list(range(1, pool.pages)), "a page was lost"


@pytest.mark.parametrize(
    "pages, page_size, window, sinks",
    [(24, 4, None, 0), (90, 1, None, 0), (12, 16, None, 0), (24, 4, 9, 0), (24, 4, 6, 5)],
    ids=["pages-of-4", "pages-of-1", "pages-of-16", "window", "window-and-sinks"],
)
def test_invariants_hold_over_random_operations(pages: int, page_size: int, window: int | None, sinks: int) -> None:
    """Ten thousand operations each: nothing leaked, nothing freed twice, nothing shared and written."""
    world = World(pages, page_size, window, sinks)
    _walk(world, 10_000, seed=pages + page_size)
    # The walk must have met what it is there for.
    assert world.refused > 20
    assert world.hits > 50
    assert page_size == 1 or world.copies > 20


class Machine(RuleBasedStateMachine):
    """The same world, driven by hypothesis, which shrinks a failure to its shortest story."""

    @initialize(window=st.sampled_from([None, 5]), sinks=st.sampled_from([0, 3]))
    def start(self, window: int | None, sinks: int) -> None:
        self.world = World(10, 4, window, sinks if window else 0, most=4)

    def _row(self, number: int) -> int:
        rows = sorted(self.world.models)
        return rows[number % len(rows)]

    @rule(prompt=st.integers(0, 2), length=st.integers(0, 20), salt=st.sampled_from(["", "other"]))
    def add(self, prompt: int, length: int, salt: str) -> None:
        tokens = PROMPTS[prompt][:length]
        row = self.world.add(tokens, salt)
        if row is not None:
            rest = tokens[len(self.world.models[row].tokens) :]
            if self.world.grow([row], [len(rest)], [rest]):
                self.world.commit(row, len(rest))

    @precondition(lambda self: self.world.models)
    @rule(number=st.integers(0, 9), tokens=st.lists(st.integers(0, 1), max_size=9), committed=st.integers(0, 9))
    def grow(self, number: int, tokens: list[int], committed: int) -> None:
        row = self._row(number)
        tokens = tokens[: self.world.cache.most_tokens - len(self.world.models[row].tokens)]
        if self.world.grow([row], [len(tokens)], [tokens]):
            self.world.commit(row, committed)

    @precondition(lambda self: self.world.models)
    @rule(count=st.integers(0, 2))
    def grow_all(self, count: int) -> None:
        rows = sorted(self.world.models)
        if max(len(self.world.models[row].tokens) for row in rows) + count <= self.world.cache.most_tokens:
            self.world.grow(rows, [count] * len(rows), [[1] * count] * len(rows))

    @precondition(lambda self: self.world.models)
    @rule(number=st.integers(0, 9))
    def fork(self, number: int) -> None:
        self.world.fork(self._row(number))

    @precondition(lambda self: self.world.models)
    @rule(number=st.integers(0, 9), share=st.floats(0, 1))
    def truncate(self, number: int, share: float) -> None:
        row = self._row(number)
        self.world.truncate(row, int(share * len(self.world.models[row].tokens)))

    @precondition(lambda self: self.world.models)
    @rule(number=st.integers(0, 9))
    def free(self, number: int) -> None:
        self.world.free(self._row(number))

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()


Machine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None, derandomize=True)
TestMachine = Machine.TestCase


def test_out_of_pages_says_how_many_and_changes_nothing() -> None:
    cache = KVCache(5, 4)
    first, second = cache.add(), cache.add()
    cache.grow(first, 12)
    with pytest.raises(OutOfPages, match="2 pages are needed and 1 are available") as refusal:
        cache.grow([first, second], [4, 2])
    assert (refusal.value.needed, refusal.value.available) == (2, 1)
    assert cache.lengths[[first, second]].tolist() == [12, 0]
    cache.grow(second, 4)
    again = pickle.loads(pickle.dumps(refusal.value))
    assert (again.needed, again.available, str(again)) == (2, 1, str(refusal.value))


def test_a_prefix_is_stored_once() -> None:
    """64 sequences of a shared 1024-token prompt: its pages exist once, and only the rest is left to compute."""
    cache = KVCache(1024, 16, most_sequences=64)
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


def test_a_draft_is_rolled_back() -> None:
    cache = KVCache(20, 4)
    rows = [cache.add(), cache.add()]
    cache.grow(rows, [3, 7])
    cache.grow(rows, 5)
    assert cache.page_counts[rows].tolist() == [2, 3]
    cache.truncate(rows, [4, 12])
    assert cache.lengths[rows].tolist() == [4, 12]
    assert cache.page_counts[rows].tolist() == [1, 3]
    cache.commit(rows, [[1] * 4] * 2)
    cache.truncate(rows, 0)
    assert cache.pool.in_use == 0
    assert cache.match([1] * 5) == 4


def test_a_findable_page_is_not_overwritten_behind_the_index() -> None:
    cache = KVCache(20, 4)
    row = cache.add([1] * 8)
    cache.grow(row, 8)
    cache.commit(row, [1] * 8)
    cache.truncate(row, 6)
    assert cache.match([1] * 9) == 8, "nothing was written yet"
    cache.grow(row, 1)
    assert cache.match([1] * 9) == 4


def test_a_window_gives_pages_up() -> None:
    cache = KVCache(40, 4, window=8, sink_tokens=3)
    row = cache.add()
    for _ in range(40):
        cache.grow(row, 1)
    assert cache.lengths[row] == 40
    # The 40th token, at 39, sees 32 to 39; page 0 holds the sinks.
    assert (cache.page_table[row, :10] != EMPTY_PAGE).tolist() == [True, *[False] * 7, True, True]
    assert cache.pool.in_use == 3
    assert cache.usage().tokens == 12
    with pytest.raises(ValueError, match="pages were given up"):
        cache.truncate(row, 35)
    cache.truncate(row, 39)
    cache.truncate(row, 2)  # only sinks are left, and they were kept
    assert cache.pool.in_use == 1


def test_a_window_frees_before_it_asks() -> None:
    """A sequence as long as one likes lives in a pool of its window and a step."""
    cache = KVCache(4, 4, window=4, most_tokens=400)
    row = cache.add()
    for _ in range(50):
        cache.grow(row, 8)
    assert cache.lengths[row] == 400


def test_waste_is_small() -> None:
    """The lengths of a served batch: well below 4% of the reserved slots hold nothing."""
    random = np.random.default_rng(0)
    cache = KVCache(20_000, 16, most_sequences=257)
    rows = np.array([cache.add() for _ in range(256)])
    cache.grow(rows, random.integers(200, 1500, 256))
    usage = cache.usage()
    assert usage.tokens == cache.lengths.sum()
    assert usage.in_use == cache.page_counts.sum()
    assert 0 < cache.waste() < 0.04
    assert cache.waste() == 1 - usage.tokens / (usage.in_use * 16)
    shared = cache.fork(int(rows[0]))
    assert cache.usage().tokens == usage.tokens, "what two sequences share counts once"
    cache.free([shared, *rows])
    assert cache.waste() == 0
    assert cache.usage().free == 19_999


def test_wrong_calls_are_refused() -> None:
    for arguments, message in [((1, 16), "none to hand out"), ((9, 12), "power of two"), ((9, 512), "power of two")]:
        with pytest.raises(ValueError, match=message):
            KVCache(*arguments)
    with pytest.raises(ValueError, match="sees at least itself"):
        KVCache(9, 16, window=0)
    with pytest.raises(ValueError, match="storage has 8 pages of 16"):
        KVCache(9, 16, storage=Memory(8, 16))
    cache = KVCache(9, 4, most_sequences=2, most_tokens=10)
    row = cache.add()
    for call, message in [
        (lambda: cache.grow(row, 11), "at most 10"),
        (lambda: cache.grow(row, -1), "0 or more"),
        (lambda: cache.grow([row, row]), "named twice"),
        (lambda: cache.grow(1), "do not exist"),
        (lambda: cache.grow(-1), "not all within"),
        (lambda: cache.grow(2), "not all within"),
        (lambda: cache.commit(row, [1]), "call grow first"),
        (lambda: cache.commit([], [1]), "not as many|cannot be committed"),
        (lambda: cache.truncate(row, 1), "cannot be cut"),
        (lambda: PageStorage(1, 2, 16, 1, 8, dtype=torch.float64), "float64"),
        (lambda: BatchTensors(cache, 1, 4).fill(row), "call grow first"),
        (lambda: BatchTensors(cache, 1, 4).fill(row, 5), "does not fit"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    cache.add()
    with pytest.raises(OutOfSequences, match="all 2 sequences are in use"):
        cache.add()
    cache.free(row)
    with pytest.raises(ValueError, match="do not exist"):
        cache.free(row)


@pytest.mark.filterwarnings("error::DeprecationWarning")  # what older numpy warns of, newer numpy refuses
def test_versions_of_one_row_and_of_several_never_repeat() -> None:
    cache = KVCache(40, 4, most_sequences=8, window=8, sink_tokens=4)
    seen: list[int] = []

    def changed(rows: list[int]) -> None:
        seen.extend(cache.versions[rows].tolist())
        assert len(set(seen)) == len(seen)

    rows = [cache.add(range(9)) for _ in range(3)]
    changed(rows)
    cache.grow(rows, [9, 5, 1])  # pages in one piece, and several for a row
    changed(rows)
    cache.commit(rows[0], range(9))
    changed([cache.fork(rows[0])])
    cache.grow(rows[0], 1)  # a copy of the last page
    changed(rows[:1])
    for _ in range(8):  # pages behind the window
        cache.grow(rows[2], 4)
        changed(rows[2:])
    cache.truncate(rows[1], 1)
    changed(rows[1:2])
    cache.free(rows)


def test_the_pool_refuses_double_releases() -> None:
    pool = PagePool(4)
    pages = pool.allocate(2)
    pool.release(pages)
    with pytest.raises(RuntimeError, match="released more often than held"):
        pool.release(pages[:1])
    with pytest.raises(RuntimeError, match="belongs to nobody"):
        pool.release(np.array([EMPTY_PAGE]))
    with pytest.raises(RuntimeError, match="cannot be shared"):
        pool.share(pages)
    assert pool.available == 3


def _expected(cache: KVCache, rows: list[int], counts: list[int]) -> tuple[list[int], list[int]]:
    slots, positions = [], []
    for row, count in zip(rows, counts):
        length = int(cache.lengths[row])
        positions += range(length - count, length)
        slots += cache.slots(row, length - count, length).tolist()
    return slots, positions


@pytest.mark.parametrize("device", DEVICES)
def test_batch_tensors_follow_the_cache(device: str) -> None:
    """Sequences come, go, change places and grow by different counts; only changed rows are sent."""
    random = np.random.default_rng(3)
    cache = KVCache(400, 4, most_sequences=16, most_tokens=100)
    tensors = BatchTensors(cache, 12, 64, device)
    rows: list[int] = []
    addresses = set()
    for _ in range(300):
        while len(rows) < 12 and random.random() < 0.4:
            rows.append(cache.fork(rows[0]) if rows and random.random() < 0.3 else cache.add())
        if rows and random.random() < 0.2:
            cache.free(rows.pop(int(random.integers(len(rows)))))
        random.shuffle(rows) if random.random() < 0.1 else None
        for row in [row for row in rows if cache.lengths[row] > 90]:
            cache.free(row)
            rows.remove(row)
        if not rows:
            continue
        counts = random.integers(0, 5, len(rows)).tolist() if random.random() < 0.5 else [1] * len(rows)
        cache.grow(rows, counts)
        pad = (12, 64) if random.random() < 0.5 else None
        given = 1 if set(counts) == {1} and random.random() < 0.5 else counts
        step = tensors.fill(rows, given, pad=pad)
        slots, positions = _expected(cache, rows, counts)
        batch, total = len(rows), sum(counts)
        padded, tokens = pad or (batch, total)
        assert step.lengths.tolist() == cache.lengths[rows].tolist() + [0] * (padded - batch)
        assert step.slots.tolist() == slots + [-1] * (tokens - total)
        assert step.positions.tolist() == positions + [0] * (tokens - total)
        ends = np.cumsum([0, *counts]).tolist()
        assert step.cu_seqlens.tolist() == ends + [total] * (padded - batch)
        assert (step.page_table.shape, step.page_table.dtype) == ((padded, 25), torch.int32)
        for place, row in enumerate(rows):
            count = int(cache.page_counts[row])
            assert step.page_table[place, :count].tolist() == cache.page_table[row, :count].tolist()
        addresses.add(tuple(tensor.data_ptr() for tensor in step if tensor.numel()))
    assert len({pointers[0] for pointers in addresses}) == 1, "a CUDA graph needs fixed addresses"


def test_a_decode_step_costs_the_host_little() -> None:
    """256 sequences grow and their tensors are filled: array operations, no loop over the sequences."""
    cache = KVCache(40_000, 16)
    rows = np.array([cache.add() for _ in range(256)])
    cache.grow(rows, np.arange(256) + 500)
    tensors = BatchTensors(cache, 256, 256)
    times = []
    for _ in range(200):
        start = time.perf_counter()
        cache.grow(rows)
        tensors.fill(rows)
        times.append(time.perf_counter() - start)
    print(f"least {min(times) * 1e6:.0f} us, median {np.median(times) * 1e6:.0f} us")
    assert min(times) < 500e-6, "far more than array operations on 256 elements take"


STORED = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", STORED, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_keys_come_back_through_pages(dtype: torch.dtype, device: str) -> None:
    """Write through slots, fork, copy on write on the device, and gather through page tables: the same keys."""
    layers, heads, dim = 2, 2, 8
    storage = PageStorage(layers, 30, 4, heads, dim, dtype=dtype, device=device)
    cache = KVCache(30, 4, most_sequences=8, most_tokens=40, storage=storage)
    tensors = BatchTensors(cache, 8, 64, device)
    generator = torch.Generator().manual_seed(0)
    written: dict[int, torch.Tensor] = {}  # [tokens, layers, heads, dim] of each sequence

    def append(rows: list[int], counts: list[int]) -> None:
        cache.grow(rows, counts)
        step = tensors.fill(rows, counts)
        new = torch.randn((sum(counts), layers, heads, dim), generator=generator)
        for layer, (k_pages, v_pages, k_scale, v_scale) in enumerate(storage.layers):
            k = new[:, layer].to(device)
            fk.append_kv(k, -k, k_pages, v_pages, step.slots, k_scale=k_scale, v_scale=v_scale)
        for row, part in zip(rows, new.split(counts)):
            written[row] = torch.cat((written.get(row, new[:0]), part))

    first = cache.add()
    append([first], [6])
    second = cache.fork(first)
    written[second] = written[first]
    append([first, second], [3, 5])
    append([first, second, cache.add()], [1, 1, 7])
    step = tensors.fill([first, second], 1)
    for place, row in enumerate((first, second)):
        length = int(cache.lengths[row])
        pages = step.page_table[place, : -(-length // 4)].long()
        for layer in range(layers):
            held = storage.layers[layer]
            for sign, kept, scale in ((1, held.k_pages, held.k_scale), (-1, held.v_pages, held.v_scale)):
                values = kept.float() if scale is None else kept.float() * scale[..., None]
                got = values[pages].flatten(0, 1)[:length].cpu()
                within = {4: 0.0, 2: 0.01, 1: 0.07 if dtype == torch.float8_e4m3fn else 0.02}[dtype.itemsize]
                torch.testing.assert_close(got * sign, written[row][:, layer], rtol=within, atol=within)
    assert not storage.k.view(torch.uint8)[:, EMPTY_PAGE].any()


def test_storage_says_what_it_takes() -> None:
    for dtype in STORED:
        storage = PageStorage(3, 5, 16, 2, 8, value_dim=6, dtype=dtype)
        assert storage.nbytes == 5 * bytes_per_page(3, 16, 2, 8, dtype, value_dim=6)
        assert storage.layers[0].v_pages.shape == (5, 16, 2, 6)
        assert (storage.layers[0].k_scale is None) == (dtype.itemsize > 1)
