"""Attention over a cache in plain torch: the ground truth, in whatever precision it is given."""

from __future__ import annotations

import math

import torch
from torch import Tensor


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
    """softmax(scores) v over the first lengths[b] keys; query i of N sits at position lengths[b] - N + i.

    `prefix_length` says what sequences share, which changes nothing in the result.
    """
    keys, values = (gathered(x, page_table, factor, q.dtype) for x, factor in ((k, k_scale), (v, v_scale)))
    count = lengths.long().clamp(max=keys.shape[1])
    position = count[:, None] - q.shape[1] + torch.arange(q.shape[1], device=q.device)  # [B, N]
    out, lse = attend(q, keys, values, position, window, sinks, sink_tokens, softcap, scale)
    return (out, lse) if return_lse else out


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
    """The same for packed queries, q (tokens, heads, dim).

    Sequence b has those of [cu_seqlens_q[b], cu_seqlens_q[b + 1]), the last of which sits at position lengths[b] - 1.
    Tokens behind the last sequence see nothing.
    """
    batch, token = lengths.shape[0], torch.arange(q.shape[0], device=q.device)
    if batch == 0:
        out = q.new_zeros((*q.shape[:2], v.shape[3]))
        lse = q.new_full((q.shape[1], q.shape[0]), -math.inf, dtype=_wide(q.dtype))
        return (out, lse) if return_lse else out
    sequence = (token[:, None] >= cu_seqlens_q[None, 1:]).sum(1)  # [T]
    mine = sequence.clamp(max=batch - 1)
    count = lengths.long().clamp(max=page_table.shape[1] * k.shape[1])
    position = torch.where(sequence < batch, count[mine] - cu_seqlens_q.long()[mine + 1] + token, -1)
    keys = gathered(k, page_table, k_scale, q.dtype)[mine]  # [T, S, Hkv, D]
    values = gathered(v, page_table, v_scale, q.dtype)[mine]
    out, lse = attend(
        q[:, None], keys, values, position[:, None], window, sinks, sink_tokens, softcap, scale
    )  # fmt: skip
    return (out[:, 0], lse[:, :, 0].transpose(0, 1)) if return_lse else out[:, 0]


def gathered(x: Tensor, page_table: Tensor | None, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Keys or values of every sequence side by side, [B, S, Hkv, D], in `dtype`."""
    x = x.to(dtype) if factor is None else (x.to(_wide(dtype)) * factor[..., None].to(_wide(dtype))).to(dtype)
    if page_table is None:
        return x
    pages = page_table.long().clamp(0, max(0, x.shape[0] - 1))  # entries that no key lies behind may be anything
    if x.shape[0] == 0:
        return x.new_zeros((page_table.shape[0], page_table.shape[1] * x.shape[1], *x.shape[2:]))
    return x[pages].flatten(1, 2)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position: Tensor,
    window: int | None,
    sinks: Tensor | None,
    sink_tokens: int,
    softcap: float,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of q [B, N, Hq, D] at `position` [B, N] against k, v [B, S, Hkv, D]; lse is [B, Hq, N]."""
    batch, queries, heads, head_dim = q.shape
    key = torch.arange(k.shape[1], device=q.device)
    seen = key <= position[:, :, None]  # [B, N, S]
    if window is not None:
        seen = seen & ((key > position[:, :, None] - window) | (key < sink_tokens))
    needed = seen.any(1)[:, :, None, None]  # [B, S, 1, 1]: by one query at least
    k, v = (torch.where(needed, x, 0) for x in (k, v))  # what was never written, or was given up, may be NaN
    groups = heads // k.shape[2]
    columns = k.permute(0, 2, 3, 1).repeat_interleave(groups, dim=1)  # [B, Hq, D, S]
    values = v.transpose(1, 2).repeat_interleave(groups, dim=1)  # [B, Hq, S, Dv]
    scores = q.transpose(1, 2) @ columns * (1 / math.sqrt(head_dim) if scale is None else scale)  # [B, Hq, N, S]
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen[:, None], -math.inf)
    # The sink is one more column, with a logit but no value; a logit of -inf is no sink.
    logits = scores.new_full((1,), -math.inf) if sinks is None else sinks.to(scores.dtype)
    scores = torch.cat([scores, logits.view(1, -1, 1, 1).expand(batch, heads, queries, 1)], dim=-1)
    highest = scores.amax(-1, keepdim=True)
    highest = highest.masked_fill(highest == -math.inf, 0)
    weights = torch.exp(scores - highest)
    total = weights.sum(-1, keepdim=True)
    blind = total == 0  # rows that see nothing
    total = total.masked_fill(blind, 1)
    out = ((weights / total)[..., :-1].to(v.dtype) @ values).transpose(1, 2)  # [B, N, Hq, Dv]
    lse = (highest + torch.log(total)).masked_fill(blind, -math.inf).squeeze(-1)  # [B, Hq, N]
    return out.to(q.dtype), lse.to(_wide(q.dtype))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
