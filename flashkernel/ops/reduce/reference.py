"""Reductions in plain torch: the ground truth, in whatever precision it is given."""

from __future__ import annotations

import torch
from torch import Tensor

NOTHING = float("-inf")


def sum(x: Tensor, *, keepdim: bool = False) -> Tensor:
    """y = sum over c of x[c]; 0 where there are no columns."""
    return x.sum(-1, keepdim=keepdim)


def mean(x: Tensor, *, keepdim: bool = False) -> Tensor:
    """y = sum(x) / columns; NaN where there are none."""
    return x.mean(-1, keepdim=keepdim)


def max(x: Tensor, *, keepdim: bool = False) -> Tensor:
    """y = the largest x[c]; columns that share it share its gradient evenly."""
    return x.amax(-1, keepdim=keepdim)


def logsumexp(x: Tensor, *, keepdim: bool = False) -> Tensor:
    """y = log(sum over c of exp(x[c])); -inf, with a gradient of zero, where every x[c] is -inf or there is none."""
    nothing = torch.isneginf(x).all(-1, keepdim=True)
    total = torch.logsumexp(x.masked_fill(nothing, 0.0), -1, keepdim=True).masked_fill(nothing, NOTHING)
    return total if keepdim else total.squeeze(-1)


def softmax(x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0, causal: bool = False) -> Tensor:
    """y[c] = exp(scale * x[c]) / sum over the visible columns of the same; 0 for the others.

    A row that sees nothing, or nothing but -inf, gives zeros.
    """
    scores = x * scale
    visible = visible_pairs(x, mask, causal)
    if visible is not None:
        scores = scores.masked_fill(~visible, NOTHING)
    nothing = torch.isneginf(scores).all(-1, keepdim=True)
    scores = scores.masked_fill(nothing, 0.0)
    return torch.exp(scores - torch.logsumexp(scores, -1, keepdim=True)).masked_fill(nothing, 0.0)


def visible_pairs(x: Tensor, mask: Tensor | None, causal: bool) -> Tensor | None:
    """True where a row sees a column: the mask, and with `causal` column k of K for row q of Q where k <= q + K - Q."""
    if not causal:
        return mask
    queries, keys = x.shape[-2:]
    row = torch.arange(queries, device=x.device)[:, None]
    earlier = torch.arange(keys, device=x.device) <= row + (keys - queries)
    return earlier if mask is None else earlier & mask


def weighted_sum(x: Tensor, weight: Tensor) -> Tensor:
    """y = sum over c of x[c] * weight[c]."""
    return (x * weight).sum(-1).to(x.dtype)
