"""Cross-entropy by torch's own operators; the fused linear form goes chunk by chunk and recomputes in backward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_BYTES = 64 * 2**20  # of logits held at once by the fused linear form


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
    flat, labels = logits.reshape(target.numel(), logits.shape[-1]), target.flatten().long()
    loss = _losses(flat, labels, ignore_index, label_smoothing, z_loss, softcap, reduction)
    return _reduce(loss, target, ignore_index, reduction)


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
    def chunk_loss(rows: Tensor, labels: Tensor) -> Tensor:
        logits = F.linear(rows, weight, bias)
        return _losses(logits, labels, ignore_index, label_smoothing, z_loss, softcap, reduction)

    flat, labels = x.reshape(target.numel(), x.shape[-1]), target.flatten().long()
    step = max(1, CHUNK_BYTES // (4 * weight.shape[0]))
    if flat.shape[0] <= step:  # few enough logits to keep
        return _reduce(chunk_loss(flat, labels), target, ignore_index, reduction)
    pairs = zip(flat.split(step), labels.split(step))
    parts = [checkpoint(chunk_loss, rows, part, use_reentrant=False) for rows, part in pairs]
    losses = torch.cat(parts) if reduction == "none" else torch.stack(parts)
    return _reduce(losses, target, ignore_index, reduction)


def _losses(
    logits: Tensor, target: Tensor, ignore: int, smoothing: float, z_loss: float, softcap: float, reduction: str
) -> Tensor:
    """Loss of each row in at least float32, or their sum unless the reduction is "none"."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap:
        wide = softcap * torch.tanh(wide / softcap)
    each = "none" if reduction == "none" else "sum"
    loss = F.cross_entropy(wide, target, ignore_index=ignore, label_smoothing=smoothing, reduction=each)
    if z_loss:
        extra = torch.where(target != ignore, z_loss * torch.logsumexp(wide, -1).square(), 0.0)
        loss = loss + (extra if each == "none" else extra.sum())
    return loss


def _reduce(loss: Tensor, target: Tensor, ignore: int, reduction: str) -> Tensor:
    if reduction == "none":
        return loss.view(target.shape)
    return loss.sum() / (target != ignore).sum().clamp(min=1) if reduction == "mean" else loss.sum()
