"""Normalization by torch's own operators: the CPU default, and what the kernels are timed against."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, residual: Tensor | None = None, *,
    eps: float = 1e-6, offset: float = 0.0,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    wide = torch.promote_types(x.dtype, torch.float32)
    total = x.to(wide) if residual is None else x.to(wide) + residual.to(wide)
    scale = None if weight is None else weight.to(wide) + offset
    y = F.rms_norm(total, total.shape[-1:], scale, eps)
    if bias is not None:
        y = y + bias
    y = y.to(x.dtype)
    return y if residual is None else (y, total.to(x.dtype))


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, residual: Tensor | None = None, *,
    eps: float = 1e-5,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    wide = torch.promote_types(x.dtype, torch.float32)
    total = x.to(wide) if residual is None else x.to(wide) + residual.to(wide)
    scale = None if weight is None else weight.to(wide)
    shift = None if bias is None else bias.to(wide)
    y = F.layer_norm(total, total.shape[-1:], scale, shift, eps).to(x.dtype)
    return y if residual is None else (y, total.to(x.dtype))
