"""Attention over a cache in plain torch: the ground truth, in whatever precision it is given."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flashkernel.ops.decode.params import AttendOptions


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, page_table: Tensor | None = None, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(S) V over the first lengths[b] keys; query i of N is at position lengths[b] - N + i.

    `options` are the fields of AttendOptions. `prefix_length` says what sequences share: it changes nothing here.
    """
    given = AttendOptions(**options)
    keys, values = gather_cache(k, v, page_table, given, q.dtype)
    out, lse = attend(q, keys, values, query_positions(q, lengths, keys.shape[1]), given)
    return (out, lse) if given.return_lse else out


def paged_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, lengths: Tensor, page_table: Tensor, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """The same for packed queries, q (tokens, heads, dim).

    Sequence b has those of [cu_seqlens_q[b], cu_seqlens_q[b + 1]), the last of which is at position lengths[b] - 1.
    Tokens behind the last sequence see nothing.
    """
    given = AttendOptions(**options)
    batch, token = lengths.shape[0], torch.arange(q.shape[0], device=q.device)
    if batch == 0:
        out = q.new_zeros((*q.shape[:2], v.shape[3]))
        lse = q.new_full((q.shape[1], q.shape[0]), -math.inf, dtype=at_least_float32(q.dtype))
        if given.sinks is not None:  # the only column that a token without a sequence sees
            lse = lse.copy_(given.sinks[:, None])
        return (out, lse) if given.return_lse else out
    sequence = (token[:, None] >= cu_seqlens_q[None, 1:]).sum(1)  # [T]
    own = sequence.clamp(max=batch - 1)
    seqlens = lengths.long().clamp(max=page_table.shape[1] * k.shape[1])
    position = torch.where(sequence < batch, seqlens[own] - cu_seqlens_q.long()[own + 1] + token, -1)
    keys, values = gather_cache(k, v, page_table, given, q.dtype)
    out, lse = attend(q[:, None], keys[own], values[own], position[:, None], given)  # keys[own]: [T, S, Hkv, D]
    return (out[:, 0], lse[:, :, 0].transpose(0, 1)) if given.return_lse else out[:, 0]


def query_positions(q: Tensor, lengths: Tensor, capacity: int) -> Tensor:
    """Positions of the queries q [B, N, Hq, D], the last of a sequence's keys; [B, N]."""
    seqlens = lengths.long().clamp(max=capacity)
    return seqlens[:, None] - q.shape[1] + torch.arange(q.shape[1], device=q.device)


def gather_cache(
    k: Tensor, v: Tensor, page_table: Tensor | None, options: AttendOptions, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys and values of every sequence, dequantized and contiguous, [B, S, Hkv, D] each, in `dtype`."""
    return _gather(k, page_table, options.k_scale, dtype), _gather(v, page_table, options.v_scale, dtype)


def _gather(x: Tensor, page_table: Tensor | None, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    wide = at_least_float32(dtype)
    x = x.to(dtype) if scale is None else (x.to(wide) * scale[..., None].to(wide)).to(dtype)
    if page_table is None:
        return x
    pages = page_table.long().clamp(0, max(0, x.shape[0] - 1))  # entries that no key lies behind may be anything
    if x.shape[0] == 0:
        return x.new_zeros((page_table.shape[0], page_table.shape[1] * x.shape[1], *x.shape[2:]))
    return x[pages].flatten(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor, position: Tensor, options: AttendOptions) -> tuple[Tensor, Tensor]:
    """(out, lse) of q [B, N, Hq, D] at `position` [B, N] against k, v [B, S, Hkv, D]; lse is [B, Hq, N]."""
    batch, seqlen_q, heads, head_dim = q.shape
    key = torch.arange(k.shape[1], device=q.device)
    visible = key <= position[:, :, None]  # [B, N, S]
    if options.window is not None:
        visible = visible & ((key > position[:, :, None] - options.window) | (key < options.sink_tokens))
    needed = visible.any(1)[:, :, None, None]  # [B, S, 1, 1]: by one query at least
    k, v = (torch.where(needed, x, 0) for x in (k, v))  # other keys may be uninitialized (NaN)
    group_size = heads // k.shape[2]
    keys = k.permute(0, 2, 3, 1).repeat_interleave(group_size, dim=1)  # [B, Hq, D, S]
    values = v.transpose(1, 2).repeat_interleave(group_size, dim=1)  # [B, Hq, S, Dv]
    scores = q.transpose(1, 2) @ keys * options.softmax_scale(head_dim)  # [B, Hq, N, S]
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    scores = scores.masked_fill(~visible[:, None], -math.inf)
    # The sink is one more column, with a logit but no value; a logit of -inf is no sink.
    sink = scores.new_full((1,), -math.inf) if options.sinks is None else options.sinks.to(scores.dtype)
    scores = torch.cat([scores, sink.view(1, -1, 1, 1).expand(batch, heads, seqlen_q, 1)], dim=-1)
    row_max = scores.amax(-1, keepdim=True)
    row_max = row_max.masked_fill(row_max == -math.inf, 0)
    p = torch.exp(scores - row_max)
    row_sum = p.sum(-1, keepdim=True)
    empty = row_sum == 0  # rows that see nothing
    row_sum = row_sum.masked_fill(empty, 1)
    out = ((p / row_sum)[..., :-1].to(v.dtype) @ values).transpose(1, 2)  # [B, N, Hq, Dv]
    lse = (row_max + torch.log(row_sum)).masked_fill(empty, -math.inf).squeeze(-1)  # [B, Hq, N]
    return out.to(q.dtype), lse.to(at_least_float32(q.dtype))


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
