"""What the norms are timed against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flashkernel.core.op import Case, Op


def eager(op: Op, case: Case) -> Callable[..., Any]:
    """Torch's own fused operator in the input's dtype."""

    def rms_norm(x: Tensor, weight: Tensor | None = None, residual: Tensor | None = None) -> Any:
        total = x if residual is None else x + residual
        y = F.rms_norm(total, total.shape[-1:], weight, 1e-6)
        return y if residual is None else (y, total)

    def layer_norm(x: Tensor, weight: Tensor | None = None, residual: Tensor | None = None) -> Any:
        total = x if residual is None else x + residual
        y = F.layer_norm(total, total.shape[-1:], weight, None, 1e-5)
        return y if residual is None else (y, total)

    return rms_norm if op.name == "rms_norm" else layer_norm


def compiled(op: Op, case: Case) -> Callable[..., Any]:
    return torch.compile(eager(op, case), dynamic=False)


def liger(op: Op, case: Case) -> Callable[..., Any]:
    from liger_kernel.transformers import functional as liger_functional

    if case.present != ("weight",):
        raise ValueError("Liger's norms take a weight and no residual")

    def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
        # in_place=False: the default overwrites dy, which a benchmark that repeats the backward cannot allow.
        return liger_functional.liger_rms_norm(x, weight, 1e-6, 0.0, "llama", False)

    def layer_norm(x: Tensor, weight: Tensor) -> Tensor:
        return liger_functional.liger_layer_norm(x, weight, torch.zeros_like(weight), 1e-5)

    return rms_norm if op.name == "rms_norm" else layer_norm
