"""What is made from tensors once for each version of them: block ranges, schedules, masks of packed calls."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import flashkernel as fk
from flashkernel.core import derived as module
from flashkernel.core import launch, library
from flashkernel.core.derived import derived
from flashkernel.core.tables import DeviceTables
from flashkernel.core.tracing import compiled_graph
from flashkernel.ops.attention.fp8.quantize import rotation


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    module._entries.clear()
    yield
    module._entries.clear()


class _Sum:
    """Counts how often it was made."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        self.made += 1
        return (torch.stack([x.sum() for x in tensors]),)

    def of(self, *tensors: Tensor, key: object = "sum") -> list[int]:
        return derived(key, tensors, self)[0].tolist()


def test_one_result_until_a_tensor_is_written_to() -> None:
    total, x, y = _Sum(), torch.arange(6), torch.ones(2, dtype=torch.int64)
    assert total.of(x, y) == total.of(x, y) == [15, 2]
    assert total.made == 1
    x[0] = 5
    assert total.of(x, y) == [20, 2]
    x.view(2, 3)[1].zero_()  # a view counts the writes of its base
    assert total.of(x, y) == [8, 2]
    assert total.made == 3
    assert total.of(x, y, key="other") == [8, 2]
    assert total.made == 4
    assert total.of(y, x) == [2, 8]
    assert total.made == 5


def test_views_are_found_by_their_base_and_place() -> None:
    total, x = _Sum(), torch.arange(12)
    for _ in range(3):  # every call makes new views
        assert total.of(x[:4]) == [6]
        assert total.of(x[4:8]) == [22]
        assert total.of(x[::3]) == [18]
        assert total.of(x.view(3, 4)) == [66]
    assert total.made == 4


def test_a_new_tensor_at_an_old_address_is_another_one() -> None:
    total, memory = _Sum(), torch.zeros(1024, dtype=torch.int64).numpy()
    for value in range(1, 20):
        memory[:] = value
        x = torch.from_numpy(memory)  # the same address, version and shape, often the same id
        assert total.of(x) == [1024 * value]
        del x
    assert total.made == 19


def test_other_memory_behind_a_tensor_is_seen() -> None:
    total, x = _Sum(), torch.arange(4)
    assert total.of(x) == [6]
    x.data = torch.ones(4, dtype=torch.int64)
    assert total.of(x) == [4]


def test_nothing_keeps_the_tensors_alive_and_entries_go_with_them() -> None:
    total = _Sum()
    for _ in range(5):
        total.of(torch.zeros(1000))
        gc.collect()
    assert len(module._entries) == 1  # that of the last one
    kept = [torch.zeros(3) for _ in range(module.MAX_ENTRIES + 5)]
    for x in kept:
        total.of(x)
    assert len(module._entries) == module.MAX_ENTRIES


def test_a_saved_tensor_is_the_one_that_was_saved() -> None:
    """The backward pass of a call finds what its forward pass made."""
    total = _Sum()

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, ids):  # type: ignore[override]
            ctx.save_for_backward(ids)
            total.of(ids)
            return 2 * x

        @staticmethod
        def backward(ctx, do):  # type: ignore[override]
            total.of(*ctx.saved_tensors)
            return 2 * do, None

    for ids in (torch.arange(6), torch.arange(12).view(3, 4)[1]):
        before = total.made
        y = Double.apply(torch.ones(3, requires_grad=True), ids)
        y.sum().backward()
        assert total.made == before + 1


def test_it_is_made_at_every_call_where_a_kept_result_could_be_wrong() -> None:
    total = _Sum()
    with torch.inference_mode():
        counted_by_nobody = torch.arange(4)
    x = torch.arange(4)
    for number in range(1, 4):
        total.of(counted_by_nobody)
        assert total.made == 2 * number - 1
        with compiled_graph():
            total.of(x)
        assert total.made == 2 * number
    assert not module._entries


def _packed(x: Tensor) -> Tensor:
    return fk.attention_varlen(x, x, x, _LENGTHS, causal=True, backend="triton")


def _rotated(x: Tensor) -> Tensor:
    return fk.rope(x[None], frequencies=_FREQUENCIES, backend="triton")


def _documents(x: Tensor) -> Tensor:
    q = x[None]
    return fk.attention(q, q, q, mask=_KEPT_APART, causal=True, backend="triton")


_LENGTHS, _KEPT_APART = torch.tensor([0, 5, 12]), fk.documents(torch.tensor([0] * 5 + [1] * 7))
_FREQUENCIES = fk.Frequencies.plain(16, theta=777.0)


@pytest.mark.parametrize("call", [_packed, _rotated, _documents])
def test_training_goes_on_after_inference_mode(call: Callable[[Tensor], Tensor]) -> None:
    """As after a validation step: what is kept for later calls can be saved for a backward pass."""
    x = torch.randn(12, 2, 16, requires_grad=True)
    with torch.inference_mode():
        wanted = call(x.detach())
    out = call(x)
    out.sum().backward()
    assert torch.equal(out, wanted)
    assert x.grad is not None


def test_tables_are_made_for_any_call() -> None:
    cache: DeviceTables[Tensor] = DeviceTables()
    with torch.inference_mode():
        table = cache.get("key", torch.device("cpu"), lambda: torch.ones(3))
        rotated = rotation(64, torch.device("cpu"))
    assert not table.is_inference()
    assert not rotated.is_inference()


def test_a_captured_call_makes_it_again_and_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph may be replayed with other values."""
    total, x = _Sum(), torch.arange(4)
    assert total.of(x) == [6]
    monkeypatch.setattr(module, "capturing", lambda: True)
    assert total.of(x) == total.of(x) == [6]
    assert total.made == 3
    monkeypatch.setattr(module, "capturing", lambda: False)
    assert total.of(x) == [6]
    assert total.made == 3
    assert len(module._entries) == 1


class _Operations(TorchDispatchMode):
    """Notes torch operations that launch a kernel on a GPU: all but allocations and views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        results = func(*args, **(kwargs or {}))
        view = any(alias is not None for alias in (result.alias_info for result in func._schema.returns))
        if "empty" not in func.__name__ and not (view and not func._schema.is_mutable):
            self.names.append(str(func))
        return results


_IDS = (torch.arange(260) // 30 % 4).int()[None]
_MASKS = {
    "documents": lambda: fk.documents(_IDS) & fk.causal(),
    "blocks": lambda: fk.block_sparse(torch.eye(9, dtype=torch.bool).repeat(4, 1, 1), 32),
    "intervals": lambda: fk.column_intervals(_IDS, _IDS + 20) & fk.causal(),
    "tensor": lambda: fk.tensor_mask(torch.ones(1, 1, 260, 260, dtype=torch.bool)),
}


@pytest.mark.parametrize("name", _MASKS)
def test_launches_and_torch_operations_of_a_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two launches make the block ranges of a tile shape; later calls have the attention kernels alone."""
    launched: list[str] = []
    monkeypatch.setattr(launch, "_run", lambda kernel, *_: launched.append(kernel.fn.__name__))
    for one in (library, module):  # the mode that counts is no reason to take another way
        monkeypatch.setattr(one, "traced", lambda x: False)
    mask = _MASKS[name]()
    q, k, v = (torch.randn(1, 260, heads, 64, dtype=torch.float16, requires_grad=True) for heads in (4, 2, 2))
    do = torch.ones_like(q)
    made = ["mask_tile_status", "mask_tile_ranges"]
    for number in range(3):
        with _Operations() as operations:
            out = fk.attention(q, k, v, mask=mask, backend="triton")
            forward, launched[:] = list(launched), []
            torch.autograd.grad(out, (q, k, v), do)
            backward, launched[:] = list(launched), []
        assert operations.names == []
        kernels = ["attention_backward_queries", "attention_backward_keys"]
        assert forward == (["attention_forward"] if number else [*made, "attention_forward"])
        assert backward[-1] == kernels[-1]
        assert [name for name in backward if name not in made] == kernels
        assert len(backward) <= (2 if number else 2 + 2 * len(made))


def test_under_torch_compile_it_is_part_of_the_graph() -> None:
    def first(x: Tensor) -> tuple[Tensor]:
        return (x.cumsum(0),)

    def last(x: Tensor) -> Tensor:
        return derived("cumsum", [x], first)[0][-1] + 1

    compiled = torch.compile(last, fullgraph=True, backend="aot_eager")
    x = torch.arange(5)
    assert compiled(x) == 11
    x[0] = 7
    assert compiled(x) == 18
    assert not module._entries


def test_threads_may_share_it() -> None:
    total, x, found = _Sum(), torch.arange(100), []

    def work() -> None:
        for _ in range(200):
            found.append(total.of(x, torch.ones(2, dtype=torch.int64)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[4950, 2]] * 800


@pytest.mark.gpu
def test_a_captured_call_is_made_again_at_each_replay() -> None:
    x, total = torch.arange(8, device="cuda"), _Sum()
    eager = derived("sum", [x], total)[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = derived("sum", [x], total)[0]
    assert total.made == 2
    x.fill_(3)
    graph.replay()
    assert captured.tolist() == [24]
    assert eager.tolist() == [28]
