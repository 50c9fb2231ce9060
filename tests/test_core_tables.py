"""The cache of device tables: who goes first, and what a CUDA graph may still read."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from flashkernel.blocks import tile_ranges
from flashkernel.blocks.mask import causal
from flashkernel.core import tables
from flashkernel.core.tables import DeviceTables, keep_alive

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """A GPU that is not there, whose stream is captured when `on`."""
    state = {"on": False}
    monkeypatch.setattr(tables, "capturing", lambda: state["on"])
    monkeypatch.setattr(tables, "_made", lambda make, device: make())
    monkeypatch.setattr(tables, "_kept_alive", {})
    return state


def test_the_entry_that_was_used_least_recently_goes_first() -> None:
    cache: DeviceTables[torch.Tensor] = DeviceTables(2)
    made: list[int] = []

    def get(key: int) -> torch.Tensor:
        return cache.get(key, CPU, lambda: made.append(key) or torch.full((1,), key))

    first = get(1)
    get(2)
    assert get(1) is first
    get(3)  # 2 goes
    assert get(1) is first
    get(2)  # 3 goes
    assert get(1) is first
    assert made == [1, 2, 3, 2]
    assert len(cache) == 2


def test_what_a_capture_used_stays_where_it_is(capture: dict[str, bool]) -> None:
    cache: DeviceTables[torch.Tensor] = DeviceTables(1)
    captured, other = (weakref.ref(cache.get(key, GPU, lambda: torch.ones(3))) for key in ("captured", "other"))
    assert captured() is None, "without a capture an entry that goes is free"
    captured = weakref.ref(cache.get("captured", GPU, lambda: torch.ones(3)))
    assert other() is None
    address = captured().data_ptr()
    capture["on"] = True
    assert cache.get("captured", GPU, lambda: torch.zeros(3)).data_ptr() == address
    capture["on"] = False
    for key in range(5):
        cache.get(key, GPU, lambda: torch.ones(3))
    gc.collect()
    assert captured().data_ptr() == address


def test_a_capture_does_not_make_tables(capture: dict[str, bool]) -> None:
    cache: DeviceTables[torch.Tensor] = DeviceTables()
    capture["on"] = True
    with pytest.raises(RuntimeError, match="run the call once before the capture"):
        cache.get("new", GPU, lambda: torch.ones(3))
    assert cache.get("new", CPU, lambda: torch.ones(3)) is not None, "the host's are no part of a graph"
    assert not tables._kept_alive


def test_pin_keeps_what_it_is_given() -> None:
    kept = torch.ones(2)
    seen = weakref.ref(kept)
    keep_alive(kept, [kept])
    del kept
    gc.collect()
    assert seen() is not None
    tables._kept_alive.clear()


def test_tile_ranges_are_evicted_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_ranges, "_cached", DeviceTables(2))

    def ranges(keys: int) -> object:
        return tile_ranges.tile_ranges(causal(), 1, 1, 16, keys, 16, 16, CPU)

    first, second = ranges(16), ranges(32)
    assert ranges(16) is first
    ranges(48)
    assert ranges(16) is first
    assert ranges(32) is not second


@pytest.mark.gpu
def test_a_graph_outlives_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured call gives the same result after its tables were evicted and their memory would have been reused."""
    import flashkernel as fk

    monkeypatch.setattr(tile_ranges, "_cached", DeviceTables(2))
    q = torch.randn(1, 256, 2, 64, device="cuda", dtype=torch.float16)
    expected = fk.attention(q, q, q, mask=fk.causal(), backend="triton")
    for _ in range(3):
        fk.attention(q, q, q, mask=fk.causal(), backend="triton")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = fk.attention(q, q, q, mask=fk.causal(), backend="triton")
    for length in (64, 128, 192):
        short = q[:, :length]
        fk.attention(short, short, short, mask=fk.causal(), backend="triton")
    filled = [torch.full((4096,), 7, device="cuda", dtype=torch.int32) for _ in range(64)]
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(found, expected)
    del filled
