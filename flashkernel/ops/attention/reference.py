"""Softmax attention in plain torch: the ground truth, in whatever precision it is given."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks import expression as ex
from flashkernel.blocks.dropout import keep
from flashkernel.ops.attention.params import AttentionOptions


def attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None, *, causal: bool = False, window: int | None = None, **given: Any,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """softmax(scores) v, with every score in memory: q is (B, Sq, Hq, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv).

    The other options are those of `AttentionOptions`.
    """
    options = AttentionOptions(**given)
    batch, seqlen_q, heads, head_dim = q.shape
    seqlen_k, group_size = k.shape[1], heads // k.shape[2]
    scale = 1 / math.sqrt(head_dim) if options.scale is None else options.scale
    # Query head h reads key and value head h // group_size.
    rows = q.transpose(1, 2)  # [B, Hq, Sq, D]
    columns = k.transpose(1, 2).repeat_interleave(group_size, dim=1)  # [B, Hq, Sk, D]
    values = v.transpose(1, 2).repeat_interleave(group_size, dim=1)  # [B, Hq, Sk, Dv]
    scores = rows @ columns.transpose(2, 3) * scale  # [B, Hq, Sq, Sk]
    scores = _changed(scores, bias, alibi_slopes, options)
    if options.mask is not None:
        scores = scores.masked_fill(~options.mask.visible(batch, heads, seqlen_q, seqlen_k, q.device), -math.inf)
    if causal or window is not None:  # a window hides later keys too
        position = torch.arange(seqlen_k - seqlen_q, seqlen_k, device=q.device).view(-1, 1)  # of each query
        key = torch.arange(seqlen_k, device=q.device)
        hidden = key > position if window is None else (key > position) | (key <= position - window)  # [Sq, Sk]
        scores = scores.masked_fill(hidden, -math.inf)

    # The sink is one more column, with a logit but no value; a logit of -inf is no sink.
    logits = scores.new_full((1,), -math.inf) if sinks is None else sinks.to(scores.dtype)
    sink = logits.view(1, -1, 1, 1).expand(batch, heads, seqlen_q, 1)
    scores = torch.cat([scores, sink], dim=-1)  # [B, Hq, Sq, Sk + 1]
    row_max = scores.detach().amax(-1, keepdim=True)
    row_max = row_max.masked_fill(row_max == -math.inf, 0)
    weights = torch.exp(scores - row_max)
    row_sum = weights.sum(-1, keepdim=True)
    sees_nothing = row_sum == 0
    row_sum = row_sum.masked_fill(sees_nothing, 1)
    probabilities = (weights / row_sum)[..., :seqlen_k]
    if options.dropout > 0:
        kept = keep(options.seed, batch, heads, seqlen_q, seqlen_k, options.dropout, q.device)
        probabilities = probabilities * kept / (1 - options.dropout)
    out = (probabilities.to(v.dtype) @ values).transpose(1, 2).to(q.dtype)  # [B, Sq, Hq, Dv]
    if not options.return_lse:
        return out
    lse = (row_max + torch.log(row_sum)).masked_fill(sees_nothing, -math.inf).squeeze(-1)  # [B, Hq, Sq]
    return out, lse.to(torch.promote_types(q.dtype, torch.float32))


def _changed(
    scores: Tensor, bias: Tensor | None, alibi_slopes: Tensor | None, options: AttentionOptions
) -> Tensor:  # fmt: skip
    """What is done to q . k, in the order that every implementation keeps."""
    batch, heads, seqlen_q, seqlen_k = scores.shape
    b = torch.arange(batch, device=scores.device).view(-1, 1, 1, 1)
    h = torch.arange(heads, device=scores.device).view(1, -1, 1, 1)
    q = torch.arange(seqlen_q, device=scores.device).view(1, 1, -1, 1)
    k = torch.arange(seqlen_k, device=scores.device).view(1, 1, 1, -1)
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if alibi_slopes is not None:
        slopes = alibi_slopes.view(-1, heads, 1, 1)  # [1 or B, Hq, 1, 1]
        scores = scores - slopes * (q + (seqlen_k - seqlen_q) - k).abs()
    if bias is not None:
        scores = scores + bias
    if options.score is None:
        return scores
    expression = ex.trace_score(options.score)
    changed = ex.evaluate(expression, {"score": scores, "b": b, "h": h, "q": q, "k": k})
    return torch.as_tensor(changed, dtype=scores.dtype, device=scores.device).expand(scores.shape)
