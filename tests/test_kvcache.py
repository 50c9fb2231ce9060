"""The paged cache: its pool and page tables, sliding windows, a step's tensors, and the memory behind the pages."""

from __future__ import annotations

import pickle
import time

import numpy as np
import pytest
import torch
from fake_memory import Memory

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
STORED = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8]


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


def _grown(cache: KVCache, steps: int, tokens: int) -> int:
    """A new sequence that got some tokens in each of some steps."""
    row = cache.add()
    for _ in range(steps):
        cache.grow(row, tokens)
    assert cache.lengths[row] == steps * tokens
    return row


def test_a_window_gives_pages_up() -> None:
    cache = KVCache(40, 4, window=8, sink_tokens=3)
    row = _grown(cache, steps=40, tokens=1)
    # The 40th token, at 39, sees 32 to 39; page 0 holds the sinks.
    assert (cache.page_table[row, :10] != EMPTY_PAGE).tolist() == [True, *[False] * 7, True, True]
    assert cache.pool.in_use == 3
    assert cache.usage().tokens == 12
    with pytest.raises(ValueError, match="pages were released"):
        cache.truncate(row, 35)
    cache.truncate(row, 39)
    cache.truncate(row, 2)  # only sinks are left, and they were kept
    assert cache.pool.in_use == 1


def test_a_window_frees_before_it_asks() -> None:
    """A sequence as long as one likes lives in a pool of its window and a step."""
    _grown(KVCache(4, 4, window=4, max_model_len=400), steps=50, tokens=8)


def test_waste_is_small() -> None:
    """The lengths of a served batch: well below 4% of the reserved slots hold nothing."""
    random = np.random.default_rng(0)
    cache = KVCache(20_000, 16, max_num_seqs=257)
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
    cache = KVCache(9, 4, max_num_seqs=2, max_model_len=10)
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
    cache = KVCache(40, 4, max_num_seqs=8, window=8, sink_tokens=4)
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
    cache = KVCache(400, 4, max_num_seqs=16, max_model_len=100)
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
        assert step.page_table.stride() == (32, 1), "a kernel compiled for one number of pages serves all"
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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", STORED, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_keys_come_back_through_pages(dtype: torch.dtype, device: str) -> None:
    """Write through slots, fork, copy on write on the device, and gather through page tables: the same keys."""
    layers, heads, dim = 2, 2, 8
    storage = PageStorage(layers, 30, 4, heads, dim, dtype=dtype, device=device)
    cache = KVCache(30, 4, max_num_seqs=8, max_model_len=40, storage=storage)
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
