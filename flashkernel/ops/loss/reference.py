"""Cross-entropy in plain torch: the ground truth, in whatever precision it is given."""

from __future__ import annotations

import torch
from torch import Tensor


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """-log softmax(logits)[target], smoothed over all classes, plus z_loss * logsumexp(logits)^2, reduced."""
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    kept = target != ignore_index
    label = target.clamp(0, logits.shape[-1] - 1).long()
    normaliser = torch.logsumexp(logits, -1)
    chosen = logits.gather(-1, label[..., None])[..., 0]
    loss = normaliser - (1 - label_smoothing) * chosen - label_smoothing * logits.mean(-1)
    loss = torch.where(kept, loss + z_loss * normaliser.square(), 0.0).to(
        torch.promote_types(loss.dtype, torch.float32)
    )
    if reduction == "none":
        return loss
    return loss.sum() / kept.sum().clamp(min=1) if reduction == "mean" else loss.sum()


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """Cross-entropy of x @ weight^T + bias."""
    logits = torch.nn.functional.linear(x, weight, bias)
    return cross_entropy(
        logits, target,
        ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss, softcap=softcap, reduction=reduction,
    )  # fmt: skip
