"""Attention over a cache by torch's operators.

On a CPU one sequence at a time, over the keys it sees and no others, without a copy where its pages are adjacent. On a
GPU, in a graph and in transforms, all sequences at once with a mask: the host does not wait for `lengths`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flashkernel.core.library import traced
from flashkernel.ops.decode import reference
from flashkernel.ops.decode.params import AttendOptions
from flashkernel.ops.decode.reference import at_least_float32, attend, gather_cache, query_positions


@dataclass(frozen=True)
class _Cache:
    """Keys and values, the page table on the host, and the scales of a quantized cache."""

    k: Tensor
    v: Tensor
    page_table: list[list[int]] | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    capacity: int

    def read(self, b: int, start: int, stop: int, dtype: torch.dtype, sinks: int = 0) -> tuple[Tensor, Tensor]:
        """Keys and values of a sequence, its first `sinks` and [start, stop), each [Hkv, sinks + stop - start, D]."""
        if sinks == start:  # one range
            sinks = start = 0
        ranges = [(0, sinks), (start, stop)] if sinks else [(start, stop)]
        k, v = (
            [self._dequantized(x, scale, b, *bounds, dtype) for bounds in ranges]
            for x, scale in ((self.k, self.k_scale), (self.v, self.v_scale))
        )
        return (torch.cat(k, 1), torch.cat(v, 1)) if sinks else (k[0], v[0])

    def _dequantized(
        self, x: Tensor, scale: Tensor | None, b: int, start: int, stop: int, dtype: torch.dtype
    ) -> Tensor:
        values = self._rows(x, b, start, stop).to(dtype)
        if scale is not None:
            values = values * self._rows(scale, b, start, stop)[..., None].to(dtype)
        return values.transpose(0, 1)

    def _rows(self, x: Tensor, b: int, start: int, stop: int) -> Tensor:
        """Positions [start, stop) of a sequence; a view where its pages are adjacent."""
        if self.page_table is None:
            return x[b, start:stop]
        size = x.shape[1]
        first = start // size
        pages = self.page_table[b][first : -(-stop // size)]
        if pages == list(range(pages[0], pages[0] + len(pages))):
            found = x[pages[0] : pages[0] + len(pages)]
        else:
            found = x.index_select(0, torch.tensor(pages, device="cpu"))
        return found.flatten(0, 1)[start - first * size : stop - first * size]


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, page_table: Tensor | None = None, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """`options` are the fields of AttendOptions; a shared prefix makes no difference here."""
    given = AttendOptions(**options)
    if traced(q) or q.device.type != "cpu":
        keys, values = gather_cache(k, v, page_table, given, at_least_float32(q.dtype))
        found = attend(q.to(keys.dtype), keys, values, query_positions(q, lengths, keys.shape[1]), given)
        return (found[0].to(q.dtype), found[1]) if given.return_lse else found[0].to(q.dtype)
    batch, seqlen_q = q.shape[:2]
    cache = _cache(k, v, page_table, given)
    if seqlen_q == 1 and batch and _plain(given) and cache.k_scale is None and not given.sink_tokens:
        rows = [_one_query(q[b], cache, b, seqlen, given) for b, seqlen in enumerate(lengths.tolist())]
        return (rows[0] if batch == 1 else torch.cat(rows)).view(batch, 1, q.shape[2], -1)
    out = q.new_empty((batch, seqlen_q, q.shape[2], v.shape[3]))
    lse = q.new_empty((batch, q.shape[2], seqlen_q), dtype=at_least_float32(q.dtype)) if given.return_lse else None
    for b, seqlen in enumerate(lengths.tolist()):
        _one_sequence(q[b], cache, b, seqlen, given, out[b], None if lse is None else lse[b])
    return out if lse is None else (out, lse)


def paged_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, lengths: Tensor, page_table: Tensor, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    given = AttendOptions(**options)
    if traced(q) or q.device.type != "cpu":
        options["return_lse"] = True
        wide = q.to(at_least_float32(q.dtype))
        found = reference.paged_attention(wide, k, v, cu_seqlens_q, lengths, page_table, **options)
        return (found[0].to(q.dtype), found[1]) if given.return_lse else found[0].to(q.dtype)
    cache = _cache(k, v, page_table, given)
    out = q.new_empty((*q.shape[:2], v.shape[3]))
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=at_least_float32(q.dtype)) if given.return_lse else None
    bounds: Sequence[int] = cu_seqlens_q.tolist()
    for b, seqlen in enumerate([*lengths.tolist(), 0]):  # tokens behind the last sequence see nothing
        own = slice(bounds[b], bounds[b + 1] if b + 1 < len(bounds) else q.shape[0])
        if own.stop > own.start:
            _one_sequence(q[own], cache, b, seqlen, given, out[own], None if lse is None else lse[:, own])
    return out if lse is None else (out, lse)


def _cache(k: Tensor, v: Tensor, page_table: Tensor | None, options: AttendOptions) -> _Cache:
    capacity = k.shape[1] * (1 if page_table is None else page_table.shape[1])
    pages = None if page_table is None else page_table.tolist()
    return _Cache(k, v, pages, options.k_scale, options.v_scale, capacity)


def _plain(options: AttendOptions) -> bool:
    """Whether scaled_dot_product_attention computes it: no sinks, no softcap, no LSE."""
    return options.sinks is None and not options.softcap and not options.return_lse


def _one_query(q: Tensor, cache: _Cache, b: int, seqlen: int, options: AttendOptions) -> Tensor:
    """`_one_sequence` for the commonest call: q [1, Hq, D], which sees all that is read. Few operators: on a CPU the
    host takes as long for them as for the attention."""
    seqlen = min(seqlen, cache.capacity)
    if seqlen <= 0:
        return q.new_zeros((1, cache.k.shape[2], q.shape[1] // cache.k.shape[2], cache.v.shape[3]))
    start = 0 if options.window is None else max(0, seqlen - options.window)
    k, v = cache.read(b, start, seqlen, q.dtype)
    rows = q.reshape(1, k.shape[0], -1, q.shape[2])  # [1, Hkv, G, D]
    return F.scaled_dot_product_attention(rows, k[None], v[None], scale=options.softmax_scale(q.shape[2]))


def _one_sequence(
    q: Tensor, cache: _Cache, b: int, seqlen: int, options: AttendOptions, out: Tensor, lse: Tensor | None
) -> None:
    """One sequence's queries q [N, Hq, D] into out [N, Hq, Dv] and lse [Hq, N]."""
    seqlen_q, heads, head_dim = q.shape
    kv_heads = cache.k.shape[2]
    group_size, scale = heads // kv_heads, options.softmax_scale(head_dim)
    seqlen = min(seqlen, cache.capacity)
    first = seqlen - seqlen_q  # position of the first query
    start = 0 if options.window is None else max(0, first + 1 - options.window)
    sinks = min(options.sink_tokens, start)  # sink tokens before the window; what lies between is not read
    if seqlen <= 0 or seqlen_q == 0:  # no keys, or no queries
        out.zero_()
        if lse is not None:
            empty = torch.full_like(lse, -math.inf)
            lse.copy_(empty if options.sinks is None else options.sinks[:, None].to(lse.dtype))
        return
    if cache.k_scale is not None:  # dequantized keys keep float32's digits
        q = q.to(at_least_float32(q.dtype))
    k, v = cache.read(b, start, seqlen, q.dtype, sinks)
    rows = q.reshape(seqlen_q, kv_heads, group_size, head_dim).permute(1, 2, 0, 3)
    rows = rows.reshape(kv_heads, group_size * seqlen_q, head_dim)
    masked = _masked(first, seqlen_q, start, seqlen, sinks, options)  # [N, S]
    if _plain(options) and (masked is None or first >= 0):
        visible = None if masked is None else (~masked).repeat(group_size, 1)
        # Four dims: with fewer, torch takes its unfused path.
        o = F.scaled_dot_product_attention(rows[None], k[None], v[None], attn_mask=visible, scale=scale)[0]
        out.copy_(o.view(kv_heads, group_size, seqlen_q, -1).permute(2, 0, 1, 3).flatten(1, 2))
        return
    wide = at_least_float32(q.dtype)
    scores = (rows.to(wide) @ k.to(wide).transpose(1, 2)).view(heads, seqlen_q, -1) * scale
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if masked is not None:
        scores = scores.masked_fill(masked, -math.inf)
    row_lse = torch.logsumexp(scores, -1)  # [Hq, N]
    if options.sinks is not None:
        row_lse = torch.logaddexp(row_lse, options.sinks[:, None].to(wide))
    p = torch.exp(scores - row_lse.masked_fill(row_lse == -math.inf, 0)[..., None])
    o = p.view(kv_heads, group_size * seqlen_q, -1) @ v.to(wide)
    out.copy_(o.view(kv_heads, group_size, seqlen_q, -1).permute(2, 0, 1, 3).flatten(1, 2))
    if lse is not None:
        lse.copy_(row_lse)


def _masked(first: int, seqlen_q: int, start: int, stop: int, sinks: int, options: AttendOptions) -> Tensor | None:
    """Which of the first `sinks` keys and those of [start, stop) each query must not see, [N, S]; None: it sees all."""
    if seqlen_q == 1:  # only its window was read
        return None
    position = torch.arange(first, first + seqlen_q, device="cpu")[:, None]
    key = torch.cat([torch.arange(sinks, device="cpu"), torch.arange(start, stop, device="cpu")])
    masked = key > position
    if options.window is not None:
        masked |= (key <= position - options.window) & (key >= options.sink_tokens)
    return masked
