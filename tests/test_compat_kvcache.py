"""flash_attn_with_kvcache against flash-attn's definition, written out sequence by sequence."""

from __future__ import annotations

import inspect
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from flashkernel.compat import kvcache
from flashkernel.compat.flash_attn import flash_attn_with_kvcache
from flashkernel.ops.decode import decode_attention

BATCH, HEADS, KV_HEADS, DIM, CAPACITY = 3, 4, 2, 16, 48
LENGTHS = [5, 0, 31]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rotated(x: Tensor, position: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x (seq, heads, dim) turned by its positions, pair by pair."""
    out = x.clone()
    half = cos.shape[1]
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        c, s = cos[position, i][:, None], sin[position, i][:, None]
        out[..., a], out[..., b] = x[..., a] * c - x[..., b] * s, x[..., b] * c + x[..., a] * s
    return out


def plain(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: tuple[int, int], softcap: float = 0.0,
    slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One sequence: q (sq, heads, dim), k and v (sk, heads_k, dim), slopes (heads,)."""
    if k.shape[0] == 0:
        return torch.zeros_like(q), torch.full((q.shape[1], q.shape[0]), -math.inf)
    groups = q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(groups, 1)) * q.shape[-1] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    i = torch.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0]
    j = torch.arange(k.shape[0])[None, :]
    if slopes is not None:
        scores = scores - slopes[:, None, None] * (i - j).abs()
    left, right = window[0], 0 if causal else window[1]
    hidden = ((j < i - left) if left >= 0 else j < 0) | ((j > i + right) if right >= 0 else j < 0)
    blind = hidden.all(-1)
    shown = scores.masked_fill(hidden & ~blind[:, None], -math.inf)
    out = torch.einsum("hqk,khd->qhd", shown.softmax(-1), v.repeat_interleave(groups, 1))
    return out.masked_fill(blind[:, None, None], 0), shown.logsumexp(-1).masked_fill(blind, -math.inf)


def expected(
    q: Tensor, keys: list[Tensor], values: list[Tensor], causal: bool, window: tuple[int, int], softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    found = [plain(q[b], keys[b], values[b], causal, window, softcap) for b in range(q.shape[0])]
    return torch.stack([out for out, _ in found]), torch.stack([lse for _, lse in found])


@pytest.mark.parametrize("queries, causal, window", [
    (1, False, (-1, -1)), (1, True, (-1, -1)), (1, False, (7, -1)), (1, False, (7, 3)), (4, True, (-1, -1)),
    (4, False, (-1, -1)), (3, True, (6, -1)), (3, False, (6, 0)),
])  # fmt: skip
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_reads_what_the_cache_holds(queries: int, causal: bool, window: tuple[int, int], softcap: float) -> None:
    q, k, v = draw(BATCH, queries, HEADS, DIM), *(draw(BATCH, CAPACITY, KV_HEADS, DIM, seed=s) for s in (1, 2))
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    out, lse = flash_attn_with_kvcache(
        q, k, v, cache_seqlens=lengths, causal=causal, window_size=window, softcap=softcap, return_softmax_lse=True
    )
    keys, values = ([x[b, :length] for b, length in enumerate(LENGTHS)] for x in (k, v))
    wanted, wanted_lse = expected(q, keys, values, causal, window, softcap)
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, wanted_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rotary", [None, "interleaved", "halves"])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("new, queries, causal", [(1, 1, True), (3, 3, True), (3, 3, False), (4, 2, True)])
def test_appends_in_place_and_reads_it(rotary: str | None, paged: bool, new: int, queries: int, causal: bool) -> None:
    q, k, v = draw(BATCH, queries, HEADS, DIM), *(draw(BATCH, new, KV_HEADS, DIM, seed=s) for s in (1, 2))
    before, table = draw(BATCH, CAPACITY, KV_HEADS, DIM, seed=3), None
    k_cache, v_cache = before.clone(), before.flip(0).clone()
    if paged:  # sequence b's pages are 3b to 3b + 2 of the row layout, stored backwards
        order = torch.arange(9).flip(0)
        table = torch.empty(9, dtype=torch.int32).scatter_(0, order, torch.arange(9, dtype=torch.int32)).view(3, 3)
        k_cache, v_cache = (x.view(9, 16, KV_HEADS, DIM)[order].contiguous() for x in (k_cache, v_cache))
    cos, sin = (function(draw(CAPACITY, 4, seed=4)) for function in (torch.cos, torch.sin))
    angles = {} if rotary is None else {
        "rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": rotary == "interleaved"
    }  # fmt: skip
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    out = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=lengths, block_table=table, causal=causal, **angles
    )
    rows_k, rows_v = before.clone(), before.flip(0).clone()
    turned = q.clone()
    for b, length in enumerate(LENGTHS):
        at = length + torch.arange(new)
        rows_k[b, at] = k[b] if rotary is None else rotated(k[b], at, cos, sin, rotary == "interleaved")
        rows_v[b, at] = v[b]
        if rotary is not None:
            where = length + torch.arange(queries) * int(causal)
            turned[b] = rotated(q[b], where, cos, sin, rotary == "interleaved")
    keys, values = ([x[b, : length + new] for b, length in enumerate(LENGTHS)] for x in (rows_k, rows_v))
    torch.testing.assert_close(out, expected(turned, keys, values, causal, (-1, -1))[0], atol=1e-5, rtol=1e-5)
    if paged:
        assert table is not None
        k_cache, v_cache = (x[table.long()].flatten(1, 2) for x in (k_cache, v_cache))
    torch.testing.assert_close(k_cache, rows_k)
    torch.testing.assert_close(v_cache, rows_v)


@pytest.mark.parametrize("capacity", [CAPACITY, 43])
def test_batch_indices_pick_rows(capacity: int) -> None:
    q, new = draw(2, 1, HEADS, DIM), draw(2, 1, KV_HEADS, DIM, seed=5)
    k_cache, v_cache = (draw(4, capacity, KV_HEADS, DIM, seed=s) for s in (1, 2))
    picked = torch.tensor([3, 1], dtype=torch.int32)
    kept = k_cache.clone()
    out = flash_attn_with_kvcache(q, k_cache, v_cache, new, new, cache_seqlens=7, cache_batch_idx=picked)
    for b, row in enumerate([3, 1]):
        kept[row, 7] = new[b, 0]
        wanted = plain(q[b], k_cache[row, :8], v_cache[row, :8], True, (-1, -1))[0]
        torch.testing.assert_close(out[b], wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(k_cache, kept)


@pytest.mark.parametrize("capacity", [64, 48, 43])
def test_batch_indices_pick_rows_where_keys_and_values_lie_differently(capacity: int) -> None:
    """As slices of buffers of different lengths: one could be read by pages, the other not."""
    q, k_cache = draw(2, 1, HEADS, DIM), draw(2, capacity, KV_HEADS, DIM, seed=1)
    v_cache = draw(2, capacity + 16, KV_HEADS, DIM, seed=2)[:, :capacity]
    picked = torch.tensor([1, 0], dtype=torch.int32)
    for k, v in ((k_cache, v_cache), (v_cache, k_cache)):
        out = flash_attn_with_kvcache(q, k, v, cache_seqlens=20, cache_batch_idx=picked)
        for b, row in enumerate([1, 0]):
            wanted = plain(q[b], k[row, :20], v[row, :20], True, (-1, -1))[0]
            torch.testing.assert_close(out[b], wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layout", ["rows", "batch_idx", "pages"])
@pytest.mark.parametrize("queries, causal, window", [
    (1, False, (-1, -1)), (3, True, (-1, -1)), (3, False, (-1, -1)), (3, False, (6, 2)), (3, False, (-1, 1)),
])  # fmt: skip
@pytest.mark.parametrize("leftpad, slopes", [(True, None), (False, "heads"), (True, "batch"), (False, None)])
def test_what_the_kernels_for_decoding_do_not_have(
    layout: str, queries: int, causal: bool, window: tuple[int, int], leftpad: bool, slopes: str | None
) -> None:
    """Keys that begin behind a row's start, ALiBi, and windows in which several queries see later keys; the cache holds
    NaN where nothing was written."""
    begin = [2, 0, 9] if leftpad else [0, 0, 0]
    q, k, v = draw(BATCH, queries, HEADS, DIM), *(draw(BATCH, 2, KV_HEADS, DIM, seed=s) for s in (1, 2))
    rows_k, rows_v = (draw(BATCH, CAPACITY, KV_HEADS, DIM, seed=s) for s in (3, 4))
    for b, (start, length) in enumerate(zip(begin, LENGTHS)):
        for rows in (rows_k, rows_v):
            rows[b, :start], rows[b, length:] = math.nan, math.nan
    where: dict[str, Tensor] = {}
    k_cache, v_cache = rows_k.clone(), rows_v.clone()
    if layout == "batch_idx":
        where["cache_batch_idx"] = torch.tensor([2, 1, 0], dtype=torch.int32)
        k_cache, v_cache = k_cache.flip(0).contiguous(), v_cache.flip(0).contiguous()
    elif layout == "pages":
        where["block_table"] = torch.arange(9, dtype=torch.int32).view(3, 3)
        k_cache, v_cache = (x.view(9, 16, KV_HEADS, DIM) for x in (k_cache, v_cache))
    of_head = torch.rand(BATCH, HEADS) if slopes == "batch" else torch.rand(HEADS).expand(BATCH, HEADS)
    cos, sin = (function(draw(CAPACITY, 4, seed=4)) for function in (torch.cos, torch.sin))
    out, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cos, sin, torch.tensor(LENGTHS, dtype=torch.int32), causal=causal,
        window_size=window, cache_leftpad=torch.tensor(begin, dtype=torch.int32) if leftpad else None,
        alibi_slopes={None: None, "heads": of_head[0], "batch": of_head}[slopes], return_softmax_lse=True, **where,
    )  # fmt: skip
    masked = causal or window != (-1, -1)
    for b, (start, length) in enumerate(zip(begin, LENGTHS)):
        at = length - start + torch.arange(2)  # rotary positions count from the first key
        turned = rotated(q[b], length - start + torch.arange(queries) * masked, cos, sin, True)
        keys = torch.cat([rows_k[b, start:length], rotated(k[b], at, cos, sin, True)])
        values = torch.cat([rows_v[b, start:length], v[b]])
        wanted = plain(turned, keys, values, causal, window, slopes=None if slopes is None else of_head[b])
        torch.testing.assert_close(out[b], wanted[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse[b], wanted[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("masked", [False, True])
def test_a_cache_with_more_rows_than_sequences(masked: bool) -> None:
    """Without cache_batch_idx sequence b is in row b, and the other rows are for more sequences."""
    q, new = draw(2, 2, HEADS, DIM), draw(2, 2, KV_HEADS, DIM, seed=5)
    k_cache, v_cache = (draw(4, CAPACITY, KV_HEADS, DIM, seed=s) for s in (1, 2))
    kept = k_cache.clone()
    out = flash_attn_with_kvcache(q, k_cache, v_cache, new, new, cache_seqlens=7, causal=masked)
    kept[:2, 7:9] = new
    for b in range(2):
        wanted = plain(q[b], k_cache[b, :9], v_cache[b, :9], masked, (-1, -1))[0]
        torch.testing.assert_close(out[b], wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(k_cache, kept)


@pytest.mark.parametrize("page_size", [512, 768, 48])
def test_pages_of_sizes_that_kernels_do_not_have(page_size: int) -> None:
    """flash-attn takes multiples of 256; what the table holds behind a sequence's last page may be anything."""
    q, new = draw(2, 1, HEADS, DIM), draw(2, 1, KV_HEADS, DIM, seed=5)
    k_cache, v_cache = (draw(4, page_size, KV_HEADS, DIM, seed=s) for s in (1, 2))
    table = torch.tensor([[3, 1, -1], [0, 2**31 - 1, -1]], dtype=torch.int32)
    lengths = [page_size + 9, page_size - 1]
    out = flash_attn_with_kvcache(
        q, k_cache, v_cache, new, new, cache_seqlens=torch.tensor(lengths, dtype=torch.int32), block_table=table
    )
    for b, pages in enumerate([[3, 1], [0]]):
        keys, values = (x[pages].flatten(0, 1)[: lengths[b] + 1] for x in (k_cache, v_cache))
        assert torch.equal(keys[-1], new[b, 0])
        torch.testing.assert_close(out[b], plain(q[b], keys, values, True, (-1, -1))[0], atol=1e-5, rtol=1e-5)


def test_without_lengths_the_whole_cache_is_read() -> None:
    q, k, v = draw(2, 1, HEADS, DIM), draw(2, 20, KV_HEADS, DIM, seed=1), draw(2, 20, KV_HEADS, DIM, seed=2)
    wanted = expected(q, list(k), list(v), False, (-1, -1))[0]
    torch.testing.assert_close(flash_attn_with_kvcache(q, k, v), wanted, atol=1e-5, rtol=1e-5)


def test_nothing_is_written_beyond_the_cache() -> None:
    q, new, cache = draw(2, 1, HEADS, DIM), draw(2, 2, KV_HEADS, DIM, seed=1), torch.zeros(2, 16, KV_HEADS, DIM)
    flash_attn_with_kvcache(q, cache, cache.clone(), new, new, cache_seqlens=15)
    assert torch.equal(cache[:, 15], new[:, 0])
    assert not cache[:, :15].any()


@pytest.mark.parametrize("integer, number", [(np.int64, np.float32), (torch.tensor, torch.tensor)])
def test_settings_may_be_numpy_scalars_or_tensors(integer, number) -> None:
    """On a GPU they become arguments of kernels, which take Python's numbers alone: hence the types are looked at."""
    q, cache = draw(2, 3, HEADS, DIM), draw(2, 32, KV_HEADS, DIM, seed=1)
    seen = {}

    def note(*args, **options):
        seen.update(options, lengths=args[3])
        return decode_attention(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kvcache, "decode_attention", note)
        got = flash_attn_with_kvcache(
            q, cache, cache, cache_seqlens=integer(20), causal=np.bool_(True), softcap=number(1.5),
            window_size=(integer(6), integer(0)), softmax_scale=number(0.5),
        )  # fmt: skip
    want = flash_attn_with_kvcache(
        q, cache, cache, cache_seqlens=20, causal=True, softcap=1.5, window_size=(6, 0), softmax_scale=0.5
    )
    assert torch.equal(got, want)
    assert (type(seen["window"]), type(seen["softcap"]), type(seen["scale"])) == (int, float, float)
    assert seen["lengths"].shape == (2,)


@pytest.mark.parametrize("settings", [{"window_size": (2.5, 0)}, {"softcap": "much"}, {"cache_seqlens": 3.5}])
def test_what_is_no_number_is_refused(settings: dict) -> None:
    q, cache = draw(2, 1, HEADS, DIM), draw(2, 16, KV_HEADS, DIM)
    with pytest.raises(TypeError, match=f"flash_attn_with_kvcache: {next(iter(settings))}.* it must be a"):
        flash_attn_with_kvcache(q, cache, cache, **settings)


def test_signature_is_flash_attns() -> None:
    assert list(inspect.signature(flash_attn_with_kvcache).parameters) == [
        "q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx",
        "cache_leftpad", "block_table", "softmax_scale", "causal", "window_size", "softcap", "rotary_interleaved",
        "alibi_slopes", "num_splits", "return_softmax_lse",
    ]  # fmt: skip


def test_refusals_say_what_to_do() -> None:
    q, cache, new = draw(2, 2, HEADS, DIM), draw(2, 16, KV_HEADS, DIM), draw(2, 2, KV_HEADS, DIM)
    some = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"cache_leftpad is torch.int32 \(1,\); it must be int32 \(2,\)"):
        flash_attn_with_kvcache(q, cache, cache, cache_leftpad=some[:1])
    with pytest.raises(ValueError, match=r"alibi_slopes has shape \(3,\); it must be \(4,\) or \(2, 4\)"):
        flash_attn_with_kvcache(q, cache, cache, alibi_slopes=torch.ones(3))
    with pytest.raises(ValueError, match="says where the new k and v go"):
        flash_attn_with_kvcache(q, cache, cache, new, new)
    with pytest.raises(ValueError, match="rotary_cos only with them"):
        flash_attn_with_kvcache(q, cache, cache, rotary_cos=torch.ones(4, 4), rotary_sin=torch.ones(4, 4))
    for angles in ({"rotary_cos": torch.ones(4, 4)}, {"rotary_sin": torch.ones(4, 4)}):
        with pytest.raises(ValueError, match="rotary_cos and rotary_sin come together"):
            flash_attn_with_kvcache(q, cache, cache, new, new, cache_seqlens=3, **angles)
    with pytest.raises(ValueError, match="leave it or block_table out"):
        flash_attn_with_kvcache(q, cache, cache, cache_batch_idx=some, block_table=some[:, None])
