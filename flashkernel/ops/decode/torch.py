"""Attention over a cache by torch: on a CPU sequence by sequence, each over the keys it sees and no others, without a
copy where they lie side by side; on a GPU, and in a graph, all at once and masked, so that nobody waits for `lengths`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from flashkernel.ops.decode import reference


@dataclass(frozen=True)
class _Scores:
    """What is done to a score, and whether the log of the sums is wanted."""

    window: int | None
    sinks: Tensor | None
    sink_tokens: int
    softcap: float
    scale: float
    return_lse: bool

    @property
    def plain(self) -> bool:
        return self.sinks is None and not self.softcap and not self.return_lse


@dataclass(frozen=True)
class _Cache:
    """Keys and values, where each sequence's pages are, and the scales of what is quantised."""

    k: Tensor
    v: Tensor
    table: list[list[int]] | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    capacity: int

    def read(self, b: int, start: int, stop: int, dtype: torch.dtype, sinks: int = 0) -> tuple[Tensor, Tensor]:
        """Keys and values [start, stop) of a sequence behind its first `sinks`, each [Hkv, sinks + stop - start, D]."""
        if sinks == start:  # nothing lies between
            sinks = start = 0
        ends = [(0, sinks), (start, stop)] if sinks else [(start, stop)]
        k, v = (
            [self._one(x, f, b, *end, dtype) for end in ends]
            for x, f in ((self.k, self.k_scale), (self.v, self.v_scale))
        )
        return (torch.cat(k, 1), torch.cat(v, 1)) if sinks else (k[0], v[0])

    def _one(self, x: Tensor, factor: Tensor | None, b: int, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        values = self._rows(x, b, start, stop).to(dtype)
        if factor is not None:
            values = values * self._rows(factor, b, start, stop)[..., None].to(dtype)
        return values.transpose(0, 1)

    def _rows(self, x: Tensor, b: int, start: int, stop: int) -> Tensor:
        """Positions [start, stop) of a sequence, one behind the other; a view where its pages are neighbours."""
        if self.table is None:
            return x[b, start:stop]
        size = x.shape[1]
        first = start // size
        pages = self.table[b][first : -(-stop // size)]
        if pages == list(range(pages[0], pages[0] + len(pages))):
            found = x[pages[0] : pages[0] + len(pages)]
        else:
            found = x.index_select(0, torch.tensor(pages))
        return found.flatten(0, 1)[start - first * size : stop - first * size]


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    page_table: Tensor | None = None,
    *,
    window: int | None = None,
    sinks: Tensor | None = None,
    sink_tokens: int = 0,
    softcap: float = 0.0,
    scale: float | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    prefix_length: int | Tensor = 0,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    scores = _Scores(
        window, sinks, sink_tokens, softcap, q.shape[-1] ** -0.5 if scale is None else scale, return_lse
    )  # fmt: skip
    if torch.compiler.is_compiling() or q.device.type != "cpu":
        wide = _wide(q.dtype)
        keys, values = (reference.gathered(x, page_table, f, wide) for x, f in ((k, k_scale), (v, v_scale)))
        count = lengths.long().clamp(max=keys.shape[1])
        position = count[:, None] - q.shape[1] + torch.arange(q.shape[1], device=q.device)
        found = _at_once(q, keys, values, position, scores)
        return found if return_lse else found[0]
    batch, queries = q.shape[:2]
    capacity = k.shape[1] * (1 if page_table is None else page_table.shape[1])
    cache = _Cache(k, v, None if page_table is None else page_table.tolist(), k_scale, v_scale, capacity)
    if queries == 1 and batch and scores.plain and k_scale is None and not sink_tokens:
        parts = [_one_query(q[b], cache, b, length, scores) for b, length in enumerate(lengths.tolist())]
        return (parts[0] if batch == 1 else torch.cat(parts)).view(batch, 1, q.shape[2], -1)
    out = q.new_empty((batch, queries, q.shape[2], v.shape[3]))
    lse = q.new_empty((batch, q.shape[2], queries), dtype=_wide(q.dtype)) if return_lse else None
    for b, length in enumerate(lengths.tolist()):
        _sequence(q[b], cache, b, length, scores, out[b], None if lse is None else lse[b])
    return out if lse is None else (out, lse)


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    lengths: Tensor,
    page_table: Tensor,
    *,
    window: int | None = None,
    sinks: Tensor | None = None,
    sink_tokens: int = 0,
    softcap: float = 0.0,
    scale: float | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    if torch.compiler.is_compiling() or q.device.type != "cpu":
        wide = _wide(q.dtype)
        found = reference.paged_attention(
            q.to(wide), k, v, cu_seqlens_q, lengths, page_table, window=window, sinks=sinks, sink_tokens=sink_tokens,
            softcap=softcap, scale=scale, k_scale=k_scale, v_scale=v_scale, return_lse=True,
        )  # fmt: skip
        return (found[0].to(q.dtype), found[1]) if return_lse else found[0].to(q.dtype)
    scores = _Scores(
        window, sinks, sink_tokens, softcap, q.shape[-1] ** -0.5 if scale is None else scale, return_lse
    )  # fmt: skip
    cache = _Cache(k, v, page_table.tolist(), k_scale, v_scale, page_table.shape[1] * k.shape[1])
    out = q.new_empty((*q.shape[:2], v.shape[3]))
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=_wide(q.dtype)) if return_lse else None
    bounds: Sequence[int] = cu_seqlens_q.tolist()
    for b, length in enumerate([*lengths.tolist(), 0]):  # tokens behind the last sequence see nothing
        mine = slice(bounds[b], bounds[b + 1] if b + 1 < len(bounds) else q.shape[0])
        if mine.stop > mine.start:
            _sequence(q[mine], cache, b, length, scores, out[mine], None if lse is None else lse[:, mine])
    return out if lse is None else (out, lse)


def _at_once(q: Tensor, k: Tensor, v: Tensor, position: Tensor, scores: _Scores) -> tuple[Tensor, Tensor]:
    out, lse = reference.attend(
        q.to(k.dtype), k, v, position, scores.window, scores.sinks, scores.sink_tokens, scores.softcap, scores.scale
    )
    return out.to(q.dtype), lse


def _one_query(q: Tensor, cache: _Cache, b: int, length: int, scores: _Scores) -> Tensor:
    """What `_sequence` does for the commonest call: q [1, Hq, D], which sees all that is read. Few operators, since on
    a CPU the host takes as long for them as for the attention."""
    length = min(length, cache.capacity)
    if length <= 0:
        return q.new_zeros((1, cache.k.shape[2], q.shape[1] // cache.k.shape[2], cache.v.shape[3]))
    start = 0 if scores.window is None else max(0, length - scores.window)
    k, v = cache.read(b, start, length, q.dtype)
    rows = q.reshape(1, k.shape[0], -1, q.shape[2])  # [1, Hkv, G, D]
    return F.scaled_dot_product_attention(rows, k[None], v[None], scale=scores.scale)


def _sequence(q: Tensor, cache: _Cache, b: int, length: int, scores: _Scores, out: Tensor, lse: Tensor | None) -> None:
    """One sequence's queries q [N, Hq, D] into out [N, Hq, Dv] and lse [Hq, N]."""
    queries, heads, head_dim = q.shape
    kv_heads = cache.k.shape[2]
    group = heads // kv_heads
    length = min(length, cache.capacity)
    first = length - queries  # position of the first query
    start = 0 if scores.window is None else max(0, first + 1 - scores.window)
    sinks = min(scores.sink_tokens, start)  # those before the window; between the two nothing is read
    if length <= 0 or queries == 0:  # nothing to see, or nobody to see it
        out.zero_()
        if lse is not None:
            lse.copy_(torch.full_like(lse, -math.inf) if scores.sinks is None else scores.sinks[:, None].to(lse.dtype))
        return
    if cache.k_scale is not None:  # a product of two roundings is not worth a narrow dtype
        q = q.to(_wide(q.dtype))
    k, v = cache.read(b, start, length, q.dtype, sinks)
    rows = (
        q.reshape(queries, kv_heads, group, head_dim).permute(1, 2, 0, 3).reshape(kv_heads, group * queries, head_dim)
    )
    hidden = _hidden(first, queries, start, length, sinks, scores)  # [N, S]
    if scores.plain and (hidden is None or first >= 0):
        seen = None if hidden is None else (~hidden).repeat(group, 1)
        # Four dims: with fewer, torch takes its unfused path.
        found = F.scaled_dot_product_attention(rows[None], k[None], v[None], attn_mask=seen, scale=scores.scale)[0]
        out.copy_(found.view(kv_heads, group, queries, -1).permute(2, 0, 1, 3).flatten(1, 2))
        return
    wide = _wide(q.dtype)
    raw = (rows.to(wide) @ k.to(wide).transpose(1, 2)).view(heads, queries, -1) * scores.scale
    if scores.softcap:
        raw = scores.softcap * torch.tanh(raw / scores.softcap)
    if hidden is not None:
        raw = raw.masked_fill(hidden, -math.inf)
    log = torch.logsumexp(raw, -1)  # [Hq, N]
    if scores.sinks is not None:
        log = torch.logaddexp(log, scores.sinks[:, None].to(wide))
    weights = torch.exp(raw - log.masked_fill(log == -math.inf, 0)[..., None])
    found = weights.view(kv_heads, group * queries, -1) @ v.to(wide)
    out.copy_(found.view(kv_heads, group, queries, -1).permute(2, 0, 1, 3).flatten(1, 2))
    if lse is not None:
        lse.copy_(log)


def _hidden(first: int, queries: int, start: int, stop: int, sinks: int, scores: _Scores) -> Tensor | None:
    """Which of the first `sinks` keys and those of [start, stop) each query must not see, [N, S]; None: it sees all."""
    if queries == 1:  # what is read begins where its window does
        return None
    position = torch.arange(first, first + queries)[:, None]
    key = torch.cat([torch.arange(sinks), torch.arange(start, stop)])
    hidden = key > position
    if scores.window is not None:
        hidden |= (key <= position - scores.window) & (key >= scores.sink_tokens)
    return hidden


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
