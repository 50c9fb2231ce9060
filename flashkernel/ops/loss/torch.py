"""Cross-entropy by torch's own operators; the fused linear form goes chunk by chunk and recomputes in backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flashkernel.ops.loss.params import LossParams

CHUNK_BYTES = 64 * 2**20  # of logits held at once by the fused linear form


def cross_entropy(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
    params = LossParams(**options)
    flat, labels = logits.reshape(target.numel(), logits.shape[-1]), target.flatten().long()
    return _reduce(_losses(flat, labels, params), target, params)


def linear_cross_entropy(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, **options: Any
) -> Tensor:  # fmt: skip
    params = LossParams(**options)

    def chunk_loss(rows: Tensor, labels: Tensor) -> Tensor:
        return _losses(F.linear(rows, weight, bias), labels, params)

    flat, labels = x.reshape(target.numel(), x.shape[-1]), target.flatten().long()
    step = max(1, CHUNK_BYTES // (4 * weight.shape[0]))
    if flat.shape[0] <= step:  # few enough logits to keep
        return _reduce(chunk_loss(flat, labels), target, params)
    chunks = zip(flat.split(step), labels.split(step))
    parts = [checkpoint(chunk_loss, rows, part, use_reentrant=False) for rows, part in chunks]
    return _reduce(torch.cat(parts) if params.reduction == "none" else torch.stack(parts), target, params)


def _losses(logits: Tensor, target: Tensor, params: LossParams) -> Tensor:
    """Loss of each row in at least float32, or their sum unless the reduction is "none"."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if params.softcap:
        wide = params.softcap * torch.tanh(wide / params.softcap)
    each = "none" if params.reduction == "none" else "sum"
    loss = F.cross_entropy(
        wide, target, ignore_index=params.ignore_index, label_smoothing=params.label_smoothing, reduction=each
    )
    if params.z_loss:
        kept = target != params.ignore_index
        extra = torch.where(kept, params.z_loss * torch.logsumexp(wide, -1).square(), 0.0)
        loss = loss + (extra if each == "none" else extra.sum())
    return loss


def _reduce(loss: Tensor, target: Tensor, params: LossParams) -> Tensor:
    if params.reduction == "none":
        return loss.view(target.shape)
    kept = (target != params.ignore_index).sum().clamp(min=1)
    return loss.sum() / kept if params.reduction == "mean" else loss.sum()
