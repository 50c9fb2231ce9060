"""Cross-entropy in plain torch: the ground truth, in whatever precision it is given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashkernel.ops.loss.params import LossParams


def cross_entropy(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
    """-log softmax(logits)[target], smoothed over all classes, plus z_loss * logsumexp(logits)^2, reduced."""
    params = LossParams(**options)
    if params.softcap:
        logits = params.softcap * torch.tanh(logits / params.softcap)
    kept = target != params.ignore_index
    label = target.clamp(0, logits.shape[-1] - 1).long()
    lse = torch.logsumexp(logits, -1)
    target_logit = logits.gather(-1, label[..., None])[..., 0]
    loss = lse - (1 - params.label_smoothing) * target_logit - params.label_smoothing * logits.mean(-1)
    loss = torch.where(kept, loss + params.z_loss * lse.square(), 0.0)
    loss = loss.to(torch.promote_types(loss.dtype, torch.float32))
    if params.reduction == "none":
        return loss
    return loss.sum() / kept.sum().clamp(min=1) if params.reduction == "mean" else loss.sum()


def linear_cross_entropy(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, **options: Any
) -> Tensor:  # fmt: skip
    """Cross-entropy of x @ weight^T + bias."""
    return cross_entropy(torch.nn.functional.linear(x, weight, bias), target, **options)
