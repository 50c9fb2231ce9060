"""Decoding and paged prefill: what the generated matrix cannot say."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import flashkernel as fk
from flashkernel.core import tune
from flashkernel.core.check import compare
from flashkernel.ops.decode.configs import COMBINE, SPLIT_KV, CombineConfig, SplitKVConfig
from flashkernel.ops.decode.spec import DECODE_ATTENTION

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
on_devices = pytest.mark.parametrize("device", DEVICES)
BACKENDS = ["torch", "triton"]


def draw(*shape: int, seed: int = 0, device: str = "cpu") -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def int32(values: Any, device: str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def paged(cache: Tensor, page: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A contiguous cache as shuffled pages and their table; what sticks out beyond the capacity is NaN."""
    batch, capacity = cache.shape[:2]
    each = -(-capacity // page)
    whole = torch.full((batch, each * page, *cache.shape[2:]), math.nan, dtype=cache.dtype)
    whole[:, :capacity] = cache.cpu()
    order = torch.randperm(batch * each, generator=torch.Generator().manual_seed(seed))
    pages = torch.empty_like(whole.view(batch * each, page, *cache.shape[2:]))
    pages[order] = whole.view(batch * each, page, *cache.shape[2:])
    return pages.to(cache.device), order.view(batch, each).int().to(cache.device)


def one_by_one(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    """Each query of each sequence and head on its own: plain numbers, no batch, no mask."""
    batch, new, heads, dim = q.shape
    group = heads // k.shape[2]
    out = torch.zeros(batch, new, heads, v.shape[3])
    for b, length in enumerate(lengths):
        for i in range(new):
            seen = length - new + i + 1
            for h in range(heads if seen > 0 else 0):
                weights = torch.softmax(k[b, :seen, h // group] @ q[b, i, h] / math.sqrt(dim), 0)
                out[b, i, h] = weights @ v[b, :seen, h // group]
    return out


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
def test_against_one_query_at_a_time(backend: str) -> None:
    q, k, v = draw(3, 2, 6, 16), draw(3, 40, 2, 16, seed=1), draw(3, 40, 2, 16, seed=2)
    lengths = [40, 1, 23]
    found = fk.decode_attention(q, k, v, int32(lengths), backend=backend)
    torch.testing.assert_close(found, one_by_one(q, k, v, lengths), atol=2e-6, rtol=2e-6)


@on_devices
@pytest.mark.parametrize("programs_per_sm", [1, 3, 8, 29])
@pytest.mark.parametrize("page", [0, 16])
def test_any_number_of_programs_gives_the_same(programs_per_sm: int, page: int, device: str) -> None:
    """Shares end inside units, at their ends, and where lengths are zero; more programs than tiles idle."""
    if device == "cuda" and programs_per_sm > 3:
        pytest.skip("more programs than fit at once are for the interpreter, which has one multiprocessor")
    lengths = [70, 0, 16, 131, 1, 64]
    q = draw(6, 2, 4, 16, device=device)
    k, v = (draw(6, 140, 2, 16, seed=seed, device=device) for seed in (1, 2))
    expected = one_by_one(q.cpu(), k.cpu(), v.cpu(), lengths)
    table = None
    if page:
        (k, table), (v, _) = paged(k, page), paged(v, page)
    for heads, merge in ((1, CombineConfig(1, 2, 4)), (2, CombineConfig(4, 8, 4))):
        config = SplitKVConfig(16, heads, 16, 4, 2, programs_per_sm, split_kv=True, overlap_combine=False)
        with tune.override(SPLIT_KV, config), tune.override(COMBINE, merge):
            found = fk.decode_attention(q, k, v, int32(lengths, device), table, backend="triton")
        torch.testing.assert_close(found.cpu(), expected, atol=2e-6, rtol=2e-6)


@on_devices
@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
@pytest.mark.parametrize("window, sink_tokens", [(None, 0), (20, 0), (20, 5)])
@pytest.mark.parametrize("page", [0, 16, 64])
def test_what_was_never_written_is_never_read(
    backend: str, window: int | None, sink_tokens: int, page: int, device: str
) -> None:
    """NaN behind the last key, numbers of no page in the table: behind the end, and before the window."""
    settings: dict[str, Any] = {"window": window, "sink_tokens": sink_tokens, "backend": backend}
    q, lengths, whole, holes = _with_holes(window, sink_tokens, page, device)
    expected = fk.decode_attention(q, *whole, lengths, **settings)
    found = fk.decode_attention(q, *holes[:2], lengths, holes[2], **settings)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("window, sink_tokens", [(None, 0), (20, 0), (20, 5)])
@pytest.mark.parametrize("page", [0, 16, 64])
def test_all_sequences_at_once_read_no_more(window: int | None, sink_tokens: int, page: int) -> None:
    """The masked way that torch goes on a GPU and in a graph, here on a CPU."""
    settings: dict[str, Any] = {"window": window, "sink_tokens": sink_tokens, "backend": "torch"}
    q, lengths, whole, holes = _with_holes(window, sink_tokens, page, "cpu")
    expected = fk.decode_attention(q, *whole, lengths, **settings)
    torch._dynamo.reset()
    compiled = torch.compile(fk.decode_attention, backend="eager", fullgraph=True)
    found = compiled(q, *holes[:2], lengths, holes[2], **settings)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


def _with_holes(
    window: int | None, sink_tokens: int, page: int, device: str
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor | None]]:
    """(q, lengths, whole keys and values, the same with NaN and no pages where no query may look, and their table)."""
    counts = [3, 90, 128, 0]
    q = draw(4, 2, 4, 16, device=device)
    whole = (draw(4, 150, 2, 16, seed=1, device=device), draw(4, 150, 2, 16, seed=2, device=device))
    k, v = (x.clone() for x in whole)
    for b, length in enumerate(counts):
        k[b, length:], v[b, length:] = math.nan, math.nan
    table = None
    if page:
        (k, table), (v, _) = paged(k, page), paged(v, page)
        for b, length in enumerate(counts):
            table[b, -(-length // page) :] = -7
            if window is not None:  # pages that no query's window reaches any more, nor the sinks
                gone = slice(-(-sink_tokens // page), max(0, length - 2 + 1 - window) // page)
                k[table[b, gone].long()], v[table[b, gone].long()] = math.nan, math.nan
                table[b, gone] = 2**31 - 1
    return q, int32(counts, device), whole, (k, v, table)


@on_devices
@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("shared", [32, 600])
def test_a_shared_prefix_is_read_once(page: int, on_device: bool, shared: int, device: str) -> None:
    """The others' copies of the prefix may be gone: only the first sequence's is read."""
    lengths = [shared + 17, shared + 2, 0, shared + 40]
    q = draw(4, 2, 4, 16, device=device)
    k, v = (draw(4, shared + 48, 2, 16, seed=seed, device=device) for seed in (1, 2))
    for x in (k, v):
        x[:, :shared] = x[:1, :shared].clone()
    counts = int32(lengths, device)
    expected = fk.decode_attention(q, k, v, counts, return_lse=True, backend="reference")
    for x in (k, v):
        x[1:, : shared // 16 * 16] = math.nan
    table = None
    if page:
        (k, table), (v, _) = paged(k, page), paged(v, page)
        table[1:, : shared // page] = table[:1, : shared // page]
    prefix = shared // 16 * 16
    found = fk.decode_attention(
        q, k, v, counts, table, prefix_length=int32([prefix], device) if on_device else prefix, return_lse=True,
        backend="triton",
    )  # fmt: skip
    for ours, plain in zip(found, expected):
        torch.testing.assert_close(ours, plain, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_verifying_is_decoding_step_by_step(backend: str) -> None:
    q, k, v = draw(2, 4, 4, 16), draw(2, 30, 2, 16, seed=1), draw(2, 30, 2, 16, seed=2)
    settings: dict[str, Any] = {"window": 9, "sink_tokens": 2, "backend": backend}
    together = fk.decode_attention(q, k, v, int32([30, 11]), **settings)
    for i in range(4):
        alone = fk.decode_attention(q[:, i : i + 1], k, v, int32([27 + i, 8 + i]), **settings)
        torch.testing.assert_close(together[:, i : i + 1], alone, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_prefill_in_chunks_is_prefill_at_once(backend: str) -> None:
    q = draw(50, 4, 16)
    pages, table = paged(draw(1, 50, 2, 16, seed=1), 16)
    values, _ = paged(draw(1, 50, 2, 16, seed=2), 16)
    whole = fk.paged_attention(q, pages, values, int32([0, 50]), int32([50]), table, backend=backend)
    for first, last in ((0, 16), (16, 17), (17, 50)):
        chunk = fk.paged_attention(
            q[first:last], pages, values, int32([0, last - first]), int32([last]), table, backend=backend
        )
        torch.testing.assert_close(chunk, whole[first:last], atol=2e-6, rtol=2e-6)


def test_prefill_is_attention() -> None:
    """One sequence's prefill against the attention operator, and against decoding of the same queries."""
    q, k, v = draw(33, 6, 16), draw(1, 61, 2, 16, seed=1), draw(1, 61, 2, 16, seed=2)
    (pages, table), (values, _) = paged(k, 32), paged(v, 32)
    mask = fk.causal() & fk.window(20)
    expected, lse = fk.attention(q[None], k, v, mask=mask, return_lse=True)
    out, found = fk.paged_attention(
        q, pages, values, int32([0, 33]), int32([61]), table, window=20, return_lse=True, backend="triton"
    )
    torch.testing.assert_close(out, expected[0], atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(found, lse[0], atol=2e-6, rtol=2e-6)
    decoded = fk.decode_attention(q[None], pages, values, int32([61]), table, window=20, backend="triton")
    torch.testing.assert_close(decoded[0], expected[0], atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
def test_lengths_beyond_the_cache_count_as_all_of_it(backend: str) -> None:
    q, k, v = draw(2, 1, 4, 16), draw(2, 20, 2, 16, seed=1), draw(2, 20, 2, 16, seed=2)
    full = fk.decode_attention(q, k, v, int32([20, 20]), window=7, backend=backend)
    beyond = fk.decode_attention(q, k, v, int32([25, 2**31 - 1]), window=7, backend=backend)
    torch.testing.assert_close(beyond, full)


@pytest.mark.parametrize("backend", BACKENDS)
def test_parts_of_the_keys_join_by_their_lse(backend: str) -> None:
    """Attention over all keys is that over two halves of them, weighted by the LSE."""
    q, k, v = draw(2, 1, 4, 16), draw(2, 64, 2, 16, seed=1), draw(2, 64, 2, 16, seed=2)
    half = int32([32, 32])
    left, left_lse = fk.decode_attention(q, k[:, :32], v[:, :32], half, return_lse=True, backend=backend)
    right, right_lse = fk.decode_attention(q, k[:, 32:], v[:, 32:], half, return_lse=True, backend=backend)
    whole, whole_lse = fk.decode_attention(q, k, v, int32([64, 64]), return_lse=True, backend=backend)
    share = torch.exp(left_lse - whole_lse).transpose(1, 2)[..., None]
    torch.testing.assert_close(whole, left * share + right * (1 - share), atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(whole_lse, torch.logaddexp(left_lse, right_lse), atol=2e-6, rtol=2e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_graph_serves_other_lengths_and_tables(dtype: torch.dtype) -> None:
    q = draw(8, 1, 32, 128, device="cuda").to(dtype)
    k, v = (draw(8, 4096, 8, 128, seed=seed, device="cuda").to(dtype) for seed in (1, 2))
    (pages, table), (values, _) = paged(k, 16), paged(v, 16)
    lengths = int32([4096, 1, 300, 17, 2222, 0, 4095, 64], "cuda")
    run = lambda: fk.decode_attention(q, pages, values, lengths, table)  # noqa: E731
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = run()
    lengths.copy_(lengths.flip(0))
    table.copy_(table.flip(0))
    k, v = k.flip(0), v.flip(0)
    exact = fk.decode_attention(q.double(), k.double(), v.double(), lengths, backend="reference")
    own = fk.decode_attention(q, k, v, lengths, backend="torch")
    for _ in range(3):
        captured.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        reports = [
            compare(f"sequence {b}", captured[b], exact[b], own[b], DECODE_ATTENTION.tolerance)
            for b in range(len(lengths))
        ]
        assert all(report.ok for report in reports), "\n".join(report.message for report in reports)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_page_table_of_one_column_may_be_a_transposed_row(backend: str) -> None:
    pages, q = draw(2, 4, 16, 2, 32), draw(3, 4, 32, seed=1)
    lengths, table = int32([5, 16, 9]), int32([[2, 0, 3]]).t()
    wanted = fk.decode_attention(q[:, None], *pages, lengths, table.clone(memory_format=torch.contiguous_format))
    found = fk.decode_attention(q[:, None], *pages, lengths, table, backend=backend)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    packed = fk.paged_attention(q, *pages, int32([0, 1, 2, 3]), lengths, table, backend=backend)
    torch.testing.assert_close(packed[:, None], wanted, atol=1e-5, rtol=1e-5)


def test_wrong_inputs_say_what_to_do() -> None:
    q, k, lengths, table = draw(2, 1, 4, 16), draw(2, 32, 2, 16), int32([3, 4]), int32([[0, 1], [1, 0]])
    call = fk.decode_attention
    for match, change in (
        (r"q has shape \(2, 4, 16\)", {"q": q[:, 0]}),
        ("k has shape", {"k": k[0]}),
        ("every key needs its value", {"v": k[:, :4]}),
        ("Hq must be a multiple of Hkv", {"q": draw(2, 1, 3, 16)}),
        ("head_dim 8", {"q": draw(2, 1, 4, 8)}),
        ("the cache has q's float dtype", {"q": q.half()}),
        (r"lengths is torch.int64", {"lengths": lengths.long()}),
        (r"must be int32 \(2,\)", {"lengths": lengths[:1]}),
        ("page_table is torch.int64", {"page_table": table.long()}),
        ("pages are given with page_table", {"k": k[:1], "v": k[:1]}),
        ("pages hold 24 keys", {"k": k[:, :24], "v": k[:, :24], "page_table": table}),
        ("one float logit a head", {"sinks": torch.ones(3)}),
        ("window is 0", {"window": 0}),
        ("stay visible beside a window", {"sink_tokens": 4}),
        ("softcap is -1", {"softcap": -1.0}),
        ("k_scale is given", {"k_scale": torch.ones(2, 32, 2), "v_scale": torch.ones(2, 32, 2)}),
        ("k_scale is missing", {"k": k.to(torch.int8), "v": k.to(torch.int8)}),
        ("one scale for each key and head", {"k": k.to(torch.int8), "v": k.to(torch.int8), "k_scale": torch.ones(2),
                                              "v_scale": torch.ones(2)}),
        ("it counts keys", {"prefix_length": -1}),
        ("int32 tensor of one element", {"prefix_length": torch.tensor([1, 2])}),
        ("no gradient", {"q": q.clone().requires_grad_()}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=match):
            call(**{"q": q, "k": k, "v": k, "lengths": lengths, **change})
    with pytest.raises(ValueError, match="one more than there are sequences"):
        fk.paged_attention(q[:, 0], k, k, lengths, lengths, table)
    with pytest.raises(ValueError, match=r"must be \(tokens, heads, head_dim\)"):
        fk.paged_attention(q, k, k, int32([0, 1, 2]), lengths, table)


def test_a_wide_head_and_a_large_batch_are_declined_with_the_reason() -> None:
    q, k = draw(1, 1, 1, 640), draw(1, 16, 1, 640)
    with pytest.raises(fk.BackendError, match="at most 512 wide"):
        fk.decode_attention(q, k, k, int32([3]), backend="triton")
    q, k = torch.zeros(5000, 1, 1, 16), torch.zeros(5000, 1, 1, 16)
    with pytest.raises(fk.BackendError, match="at most 4096 sequences"):
        fk.decode_attention(q, k, k, torch.ones(5000, dtype=torch.int32), backend="triton")
