"""Softmax attention in plain torch: the ground truth, in whatever precision it is given."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks import expression as ex
from flashkernel.blocks.dropout import keep
from flashkernel.blocks.mask import Mask


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    *,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    score: Callable[..., Any] | None = None,
    dropout: float = 0.0,
    seed: int | Tensor = 0,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scores) v, with every score in memory: q is (B, Sq, Hq, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv)."""
    batch, queries, heads, head_dim = q.shape
    keys, groups = k.shape[1], heads // k.shape[2]
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    # Query head h reads key and value head h // groups.
    rows = q.transpose(1, 2)  # [B, Hq, Sq, D]
    columns = k.transpose(1, 2).repeat_interleave(groups, dim=1)  # [B, Hq, Sk, D]
    values = v.transpose(1, 2).repeat_interleave(groups, dim=1)  # [B, Hq, Sk, Dv]
    scores = rows @ columns.transpose(2, 3) * scale  # [B, Hq, Sq, Sk]
    scores = _changed(scores, bias, alibi_slopes, softcap, score)
    if mask is not None:
        scores = scores.masked_fill(~mask.visible(batch, heads, queries, keys, q.device), -math.inf)

    # The sink is one more column, with a logit but no value; a logit of -inf is no sink.
    logits = scores.new_full((1,), -math.inf) if sinks is None else sinks.to(scores.dtype)
    sink = logits.view(1, -1, 1, 1).expand(batch, heads, queries, 1)
    scores = torch.cat([scores, sink], dim=-1)  # [B, Hq, Sq, Sk + 1]
    highest = scores.detach().amax(-1, keepdim=True)
    highest = highest.masked_fill(highest == -math.inf, 0)
    weights = torch.exp(scores - highest)
    total = weights.sum(-1, keepdim=True)
    blind = total == 0  # rows that see nothing
    total = total.masked_fill(blind, 1)
    probabilities = (weights / total)[..., :keys]
    if dropout > 0:
        kept = keep(seed, batch, heads, queries, keys, dropout, q.device)
        probabilities = probabilities * kept / (1 - dropout)
    out = (probabilities.to(v.dtype) @ values).transpose(1, 2).to(q.dtype)  # [B, Sq, Hq, Dv]
    if not return_lse:
        return out
    lse = (highest + torch.log(total)).masked_fill(blind, -math.inf).squeeze(-1)  # [B, Hq, Sq]
    return out, lse.to(torch.promote_types(q.dtype, torch.float32))


def _changed(
    scores: Tensor,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    softcap: float,
    score: Callable[..., Any] | None,
) -> Tensor:
    """What is done to q . k, in the order that every implementation keeps."""
    batch, heads, queries, keys = scores.shape
    b = torch.arange(batch, device=scores.device).view(-1, 1, 1, 1)
    h = torch.arange(heads, device=scores.device).view(1, -1, 1, 1)
    q = torch.arange(queries, device=scores.device).view(1, 1, -1, 1)
    k = torch.arange(keys, device=scores.device).view(1, 1, 1, -1)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        slopes = alibi_slopes.view(-1, heads, 1, 1)  # [1 or B, Hq, 1, 1]
        scores = scores - slopes * (q + (keys - queries) - k).abs()
    if bias is not None:
        scores = scores + bias
    if score is None:
        return scores
    expression = ex.trace_score(score)
    changed = ex.evaluate(expression, {"score": scores, "b": b, "h": h, "q": q, "k": k})
    return torch.as_tensor(changed, dtype=scores.dtype, device=scores.device).expand(scores.shape)
