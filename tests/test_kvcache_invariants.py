"""The paged cache's invariants under tens of thousands of random operations.

The walk keeps a plain model beside the cache: for every sequence the list of what its slots must hold, and a fake
device memory into which only slots given by the cache are written.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import numpy as np
import pytest
from fake_memory import Memory
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flashkernel.kvcache import EMPTY_PAGE, KVCache, OutOfPages, OutOfSequences


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
            pages, page_size, max_num_seqs=most, max_model_len=max(43, 10 * page_size + 3), window=window,
            sink_tokens=sinks, storage=self.memory,
        )  # fmt: skip
        self.window, self.sinks = window, sinks
        self.models: dict[int, Model] = {}
        self.refused = self.hits = self.copies = 0

    def add(self, tokens: list[int], salt: str) -> int | None:
        expected = self.cache.match(tokens, salt=salt)
        if len(self.models) == self.cache.max_num_seqs:
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
        if len(self.models) == self.cache.max_num_seqs:
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
        most = world.cache.max_model_len
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
        tokens = tokens[: self.world.cache.max_model_len - len(self.world.models[row].tokens)]
        if self.world.grow([row], [len(tokens)], [tokens]):
            self.world.commit(row, committed)

    @precondition(lambda self: self.world.models)
    @rule(count=st.integers(0, 2))
    def grow_all(self, count: int) -> None:
        rows = sorted(self.world.models)
        if max(len(self.world.models[row].tokens) for row in rows) + count <= self.world.cache.max_model_len:
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
