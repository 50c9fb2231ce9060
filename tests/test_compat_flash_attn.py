"""flash-attn's functions against flash-attn's definitions, written out sequence by sequence."""

from __future__ import annotations

import inspect
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from flashkernel.blocks.mask import EMPTY, FULL
from flashkernel.blocks.packed import packed_mask
from flashkernel.compat import flash_attn as compat

WINDOWS = [(-1, -1), (3, 0), (0, 0), (2, 4), (-1, 2), (4, -1)]
LENGTHS = [([5, 1, 9, 6], [5, 1, 9, 6]), ([5, 1, 9, 6], [8, 3, 9, 2]), ([4, 0, 7], [6, 3, 0]), ([12], [12])]


def plain(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: tuple[int, int], softcap: float, slopes: Tensor | None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One sequence: q (sq, heads, dim), k and v (sk, heads_k, dim), slopes (heads,); (out, lse (heads, sq))."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    i = torch.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0]
    j = torch.arange(k.shape[0])[None, :]
    if slopes is not None:
        scores = scores - slopes[:, None, None] * (i - j).abs()
    left, right = window
    right = 0 if causal else right
    hidden = torch.zeros(q.shape[0], k.shape[0], dtype=torch.bool)
    if left >= 0:
        hidden |= j < i - left
    if right >= 0:
        hidden |= j > i + right
    blind = hidden.all(-1)
    shown = scores.masked_fill(hidden & ~blind[:, None], -math.inf)
    if k.shape[0] == 0:
        return torch.zeros_like(q), torch.full((q.shape[1], q.shape[0]), -math.inf, dtype=q.dtype)
    out = torch.einsum("hqk,khd->qhd", shown.softmax(-1), v).masked_fill(blind[:, None, None], 0)
    return out, shown.logsumexp(-1).masked_fill(blind, -math.inf)


def tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def agree(found: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    seed = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=found.dtype)
    ours = torch.autograd.grad(found, inputs, seed, retain_graph=True)
    theirs = torch.autograd.grad(expected, inputs, seed, retain_graph=True, allow_unused=True)
    for one, other, given in zip(ours, theirs, inputs):
        torch.testing.assert_close(one, torch.zeros_like(given) if other is None else other, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [(11, 11), (5, 13), (13, 5)])
def test_windows_and_causality(sizes: tuple[int, int], causal: bool, window: tuple[int, int]) -> None:
    q, k, v = inputs = tensors((2, sizes[0], 4, 8), (2, sizes[1], 2, 8), (2, sizes[1], 2, 8))
    out, lse, probabilities = compat.flash_attn_func(q, k, v, causal=causal, window_size=window, return_attn_probs=True)
    expected = [plain(q[b], k[b], v[b], causal, window, 0.0, None) for b in range(2)]
    agree(out, torch.stack([each[0] for each in expected]), inputs)
    torch.testing.assert_close(lse, torch.stack([each[1] for each in expected]).to(lse.dtype), atol=1e-5, rtol=1e-5)
    assert lse.shape == (2, 4, sizes[0])
    assert probabilities is None


@pytest.mark.parametrize("by_batch", [False, True])
def test_softcap_scale_and_alibi(by_batch: bool) -> None:
    q, k, v = inputs = tensors((2, 6, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8))
    slopes = torch.rand(2, 4) if by_batch else torch.rand(4)
    out = compat.flash_attn_func(q, k, v, 0.0, 0.3, True, (4, -1), 2.0, slopes, True)
    each = slopes if by_batch else slopes.expand(2, 4)
    agree(out, torch.stack([plain(q[b], k[b], v[b], True, (4, -1), 2.0, each[b], 0.3)[0] for b in range(2)]), inputs)
    torch.testing.assert_close(  # flash-attn: a softcap of zero or less is none
        compat.flash_attn_func(q, k, v, softcap=-1.0), compat.flash_attn_func(q, k, v)
    )


def cumulative(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def by_sequence(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[list[int], list[int]], *options: object) -> list:
    slopes = options[-1]
    parts = zip(*(x.split(sizes) for x, sizes in ((q, lengths[0]), (k, lengths[1]), (v, lengths[1]))))
    return [
        plain(*part, *options[:-1], slopes[n] if isinstance(slopes, Tensor) and slopes.ndim == 2 else slopes)
        for n, part in enumerate(parts)
    ]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_packed(lengths: tuple[list[int], list[int]], causal: bool, window: tuple[int, int]) -> None:
    total_q, total_k = sum(lengths[0]), sum(lengths[1])
    q, k, v = inputs = tensors((total_q, 4, 8), (total_k, 2, 8), (total_k, 2, 8))
    out, lse, _ = compat.flash_attn_varlen_func(
        q, k, v, cumulative(lengths[0]), cumulative(lengths[1]), max(lengths[0]), max(lengths[1]),
        causal=causal, window_size=window, return_attn_probs=True,
    )  # fmt: skip
    expected = by_sequence(q, k, v, lengths, causal, window, 0.0, None)
    agree(out, torch.cat([each[0] for each in expected]), inputs)
    assert lse.shape == (4, total_q)
    torch.testing.assert_close(lse, torch.cat([each[1] for each in expected], -1).to(lse.dtype), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("by_sequences", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_packed_alibi_counts_within_a_sequence(lengths: tuple[list[int], list[int]], by_sequences: bool) -> None:
    q, k, v = inputs = tensors((sum(lengths[0]), 4, 8), (sum(lengths[1]), 2, 8), (sum(lengths[1]), 2, 8))
    slopes = torch.rand(len(lengths[0]), 4) if by_sequences else torch.rand(4)
    cu_q = cumulative(lengths[0])
    cu_k = cu_q if lengths[0] == lengths[1] else cumulative(lengths[1])
    out = compat.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 9, 9, causal=True, softcap=3.0, alibi_slopes=slopes)
    expected = by_sequence(q, k, v, lengths, True, (-1, -1), 3.0, slopes)
    agree(out, torch.cat([each[0] for each in expected]), inputs)


def test_keys_and_values_in_pages() -> None:
    """Pages in any order, one of them shared, give what the packed sequences give, gradients included."""
    lengths_q, lengths_k, page_size = [3, 1, 4], [7, 4, 11], 4
    table = torch.tensor([[5, 2, 0], [5, 0, 0], [1, 3, 4]], dtype=torch.int32)
    q, k, v = inputs = tensors((8, 4, 8), (6, page_size, 2, 8), (6, page_size, 2, 8))
    cu_q, cu_k = cumulative(lengths_q), cumulative(lengths_k)
    packed = [
        torch.cat([x[table[n].long()].flatten(0, 1)[:length] for n, length in enumerate(lengths_k)]) for x in (k, v)
    ]
    options = {"causal": True, "window_size": (5, 0)}
    expected = compat.flash_attn_varlen_func(q, *packed, cu_q, cu_k, 4, 11, **options)
    agree(compat.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 4, 11, block_table=table, **options), expected, inputs)


@pytest.mark.parametrize("window", [(-1, -1), (5, 0), (3, 2)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("softcap, slopes", [(0.0, None), (2.0, None), (0.0, "heads"), (1.5, "sequences")])
@pytest.mark.parametrize("kv_heads, dtype", [(4, torch.int32), (1, torch.int64)])
def test_pages_with_every_option(
    kv_heads: int, dtype: torch.dtype, softcap: float, slopes: str | None, causal: bool, window: tuple[int, int]
) -> None:
    """Against each sequence alone, with empty ones, pages in any order and pages of nobody."""
    lengths_q, lengths_k, page_size = [3, 0, 1, 6], [7, 2, 0, 11], 4
    table = torch.tensor([[5, 2, -1], [7, -1, -1], [0, 0, 0], [1, 3, 4]], dtype=torch.int32)
    q, k, v = inputs = tensors((10, 4, 8), (9, page_size, kv_heads, 8), (9, page_size, kv_heads, 8))
    with torch.no_grad():
        for pages in (k, v):  # a page that no sequence has, and what was never written behind the last keys
            pages[8] = pages[2, 3] = pages[7, 2:] = pages[4, 3] = float("nan")
    alibi = {None: None, "heads": torch.rand(4), "sequences": torch.rand(4, 4)}[slopes]
    cu_q, cu_k = (cumulative(lengths).to(dtype) for lengths in (lengths_q, lengths_k))
    out, lse, _ = compat.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 9, 12, causal=causal, window_size=window, softcap=softcap, alibi_slopes=alibi,
        return_attn_probs=True, block_table=table,
    )  # fmt: skip
    packed = [
        torch.cat([x[table[n].clamp(min=0).long()].flatten(0, 1)[:length] for n, length in enumerate(lengths_k)])
        for x in (k, v)
    ]
    expected = by_sequence(q, *packed, (lengths_q, lengths_k), causal, window, softcap, alibi)
    agree(out, torch.cat([each[0] for each in expected]), inputs)
    torch.testing.assert_close(lse, torch.cat([each[1] for each in expected], -1).to(lse.dtype), atol=1e-5, rtol=1e-5)


def test_tokens_behind_the_last_sequence_see_nothing() -> None:
    q, k, v = inputs = tensors((16, 2, 8), (16, 2, 8), (16, 2, 8))
    lengths = cumulative([5, 6])
    out = compat.flash_attn_varlen_func(q, k, v, lengths, lengths, 6, 6)
    assert not out[11:].any()
    assert not any(dx[11:].any() for dx in torch.autograd.grad(out.sum(), inputs))


@pytest.mark.parametrize("causal", [False, True])
def test_packed_alibi_ignores_keys_behind_the_last_sequence(causal: bool) -> None:
    q, k, v = tensors((12, 4, 8), (15, 2, 8), (15, 2, 8))
    lengths, slopes = cumulative([5, 7]), torch.tensor([0.1, 0.2, 0.4, 0.8], dtype=q.dtype)
    found, wanted = (
        compat.flash_attn_varlen_func(
            q, keys, values, lengths, lengths, 7, 7, causal=causal, alibi_slopes=slopes, return_attn_probs=True
        )
        for keys, values in ((k, v), (k[:12], v[:12]))
    )  # fmt: skip
    for one, other in zip(found[:2], wanted[:2]):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_packed_sequences_compile_into_one_graph() -> None:
    q, k, v = inputs = tensors((21, 4, 8), (22, 2, 8), (22, 2, 8))

    def run(*tensors: Tensor) -> Tensor:
        return compat.flash_attn_varlen_func(*tensors, 9, 9, causal=True, window_size=(3, 0))

    torch._dynamo.reset()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    compiled(q, k, v, cumulative([9, 9, 2, 1]), cumulative([9, 9, 2, 2]))
    for stance, lengths in (("default", LENGTHS[1]), ("fail_on_recompile", ([6, 0, 8, 7], [2, 9, 3, 8]))):
        with torch.compiler.set_stance(stance):  # other lengths need no other graph
            found = compiled(q, k, v, cumulative(lengths[0]), cumulative(lengths[1]))
        expected = by_sequence(q, k, v, lengths, True, (3, 0), 0.0, None)
        agree(found, torch.cat([each[0] for each in expected]), inputs)
    torch._dynamo.reset()


@pytest.mark.parametrize("shape", [(4,), (4, 4)])
def test_packed_alibi_compiles_into_one_graph(shape: tuple[int, ...]) -> None:
    lengths, slopes = LENGTHS[1], torch.rand(shape)
    q, k, v = inputs = tensors((21, 4, 8), (22, 2, 8), (22, 2, 8))

    def run(*tensors: Tensor) -> Tensor:
        return compat.flash_attn_varlen_func(*tensors, 9, 9, causal=True, alibi_slopes=slopes)

    torch._dynamo.reset()
    found = torch.compile(run, backend="aot_eager", fullgraph=True)(q, k, v, *map(cumulative, lengths))
    expected = by_sequence(q, k, v, lengths, True, (-1, -1), 0.0, slopes)
    agree(found, torch.cat([each[0] for each in expected]), inputs)
    torch._dynamo.reset()


@pytest.mark.parametrize("lengths", LENGTHS)
def test_tiles_of_a_packed_mask_do_not_contradict_it(lengths: tuple[list[int], list[int]]) -> None:
    queries, keys = sum(lengths[0]), sum(lengths[1])
    for left, right in ((None, None), (3, 0), (None, 0), (1, 2)):
        mask, _ = packed_mask(cumulative(lengths[0]), cumulative(lengths[1]), queries, left, right)
        seen = mask.visible(1, 1, queries, keys)[0, 0]
        status = mask.tiles(1, 1, queries, keys, 4, 4)[0, 0].repeat_interleave(4, 0).repeat_interleave(4, 1)
        status = status[:queries, :keys]
        assert not seen[status == EMPTY].any()
        assert seen[status == FULL].all()


@pytest.mark.parametrize("causal", [False, True])
def test_packed_tensors(causal: bool) -> None:
    (qkv,) = tensors((2, 7, 3, 4, 8))
    q, k, v = qkv.unbind(2)
    expected = compat.flash_attn_func(q, k, v, causal=causal)
    agree(compat.flash_attn_qkvpacked_func(qkv, causal=causal), expected, [qkv])
    agree(compat.flash_attn_kvpacked_func(q, qkv[:, :, 1:], causal=causal), expected, [qkv])
    flat, lengths = qkv.flatten(0, 1), cumulative([7, 7])
    agree(compat.flash_attn_varlen_qkvpacked_func(flat, lengths, 7, causal=causal), expected.flatten(0, 1), [qkv])
    found = compat.flash_attn_varlen_kvpacked_func(flat[:, 0], flat[:, 1:], lengths, lengths, 7, 7, causal=causal)
    agree(found, expected.flatten(0, 1), [qkv])


@pytest.mark.parametrize("integer, number", [(np.int64, np.float32), (torch.tensor, torch.tensor)])
def test_settings_may_be_numpy_scalars_or_tensors(integer, number) -> None:
    q, k, v = (torch.randn(2, 9, 2, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    got = compat.flash_attn_func(
        q, k, v, number(0.0), number(0.5), np.bool_(False), (integer(3), integer(-1)), number(1.5)
    )
    assert torch.equal(got, compat.flash_attn_func(q, k, v, 0.0, 0.5, False, (3, -1), 1.5))


def test_dropout_follows_torchs_generator() -> None:
    q, k, v = tensors((1, 32, 2, 8), (1, 32, 2, 8), (1, 32, 2, 8))
    ones = torch.ones_like(v)

    def dropped(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return compat.flash_attn_func(q, k, ones, dropout_p=0.5)

    assert torch.equal(dropped(0), dropped(0))
    assert not torch.equal(dropped(0), dropped(1))
    mean = torch.stack([dropped(seed).mean() for seed in range(20)]).mean()
    assert abs(mean.item() - 1) < 0.05  # kept probabilities are scaled by 1 / (1 - p)
    state = torch.get_rng_state()
    compat.flash_attn_func(q, k, v)
    assert torch.equal(state, torch.get_rng_state())


SIGNATURE = ["dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "deterministic",
             "return_attn_probs"]  # fmt: skip
LEADING = {
    "flash_attn_func": ["q", "k", "v"],
    "flash_attn_kvpacked_func": ["q", "kv"],
    "flash_attn_qkvpacked_func": ["qkv"],
    "flash_attn_varlen_func": ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"],
    "flash_attn_varlen_kvpacked_func": ["q", "kv", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"],
    "flash_attn_varlen_qkvpacked_func": ["qkv", "cu_seqlens", "max_seqlen"],
}


@pytest.mark.parametrize("name", LEADING)
def test_signatures_are_those_of_flash_attn(name: str) -> None:
    parameters = list(inspect.signature(getattr(compat, name)).parameters)
    assert parameters == LEADING[name] + SIGNATURE + (["block_table"] if name == "flash_attn_varlen_func" else [])


def test_refusals_say_what_to_do() -> None:
    q, k, v = tensors((6, 2, 8), (6, 2, 8), (6, 2, 8))
    lengths = cumulative([6])
    with pytest.raises(ValueError, match=r"with block_table, k .* must be \(num_blocks"):
        compat.flash_attn_varlen_func(q, k, v, lengths, lengths, 6, 6, block_table=torch.zeros(1, 1).int())
    pages = torch.zeros(3, 4, 2, 8)
    with pytest.raises(ValueError, match=r"block_table is torch\.int32"):
        compat.flash_attn_varlen_func(q, pages, pages, lengths, lengths, 6, 6, block_table=torch.zeros(2, 1).int())
    with pytest.raises(ValueError, match="max_seqlen_k is 6"):
        compat.flash_attn_varlen_func(q, pages, pages, lengths, lengths, 6, 6, block_table=torch.zeros(1, 1).int())
    with pytest.raises(ValueError, match="one more than there are sequences"):
        compat.flash_attn_varlen_func(q, k, v, lengths, cumulative([3, 3]), 6, 6)
    with pytest.raises(ValueError, match=r"\(total, heads, head_dim\)"):
        compat.flash_attn_varlen_func(q[None], k, v, lengths, lengths, 6, 6)
    with pytest.raises(ValueError, match="cu_seqlens_q is torch"):
        compat.flash_attn_varlen_func(q, k, v, lengths.float(), lengths, 6, 6)
    with pytest.raises(ValueError, match="alibi_slopes has shape"):
        compat.flash_attn_varlen_func(q, k, v, lengths, lengths, 6, 6, alibi_slopes=torch.rand(3, 2))
    with pytest.raises(ValueError, match="qkv has shape"):
        compat.flash_attn_qkvpacked_func(torch.zeros(1, 6, 2, 2, 8))
