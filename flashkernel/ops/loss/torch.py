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
    loss = _rows(
        logits.reshape(target.numel(), logits.shape[-1]),
        target.flatten(),
        ignore_index,
        label_smoothing,
        z_loss,
        softcap,
    )
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
        return _rows(F.linear(rows, weight, bias), labels, ignore_index, label_smoothing, z_loss, softcap)

    flat, labels = x.reshape(target.numel(), x.shape[-1]), target.flatten()
    step = max(1, CHUNK_BYTES // (4 * weight.shape[0]))
    pairs = zip(flat.split(step), labels.split(step))
    parts = [checkpoint(chunk_loss, rows, part, use_reentrant=False) for rows, part in pairs]
    return _reduce(torch.cat(parts), target, ignore_index, reduction)


def _rows(logits: Tensor, target: Tensor, ignore: int, smoothing: float, z_loss: float, softcap: float) -> Tensor:
    """Loss of each row, in at least float32."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap:
        wide = softcap * torch.tanh(wide / softcap)
    loss = F.cross_entropy(wide, target, ignore_index=ignore, label_smoothing=smoothing, reduction="none")
    if z_loss:
        loss = loss + torch.where(target != ignore, z_loss * torch.logsumexp(wide, -1).square(), 0.0)
    return loss


def _reduce(loss: Tensor, target: Tensor, ignore: int, reduction: str) -> Tensor:
    if reduction == "none":
        return loss.view(target.shape)
    return loss.sum() / (target != ignore).sum().clamp(min=1) if reduction == "mean" else loss.sum()
