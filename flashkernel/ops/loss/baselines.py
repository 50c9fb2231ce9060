"""What the losses are timed against."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from flashkernel.core.op import Case, Op


def eager(op: Op, case: Case) -> Callable[..., Tensor]:
    def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), target)

    def linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight).float(), target)

    return cross_entropy if op.name == "cross_entropy" else linear_cross_entropy


def compiled(op: Op, case: Case) -> Callable[..., Tensor]:
    return torch.compile(eager(op, case), dynamic=False)


def liger(op: Op, case: Case) -> Callable[..., Tensor]:
    from liger_kernel.transformers import functional as liger_functional

    def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
        # It turns the logits into their gradient in place: a benchmark that repeats the call must give it a copy.
        return liger_functional.liger_cross_entropy(logits.clone(), target)

    def linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return liger_functional.liger_fused_linear_cross_entropy(x, weight, target)

    return cross_entropy if op.name == "cross_entropy" else linear_cross_entropy


def cut_cross_entropy(op: Op, case: Case) -> Callable[..., Tensor]:
    from cut_cross_entropy import linear_cross_entropy as cut

    def linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return cut(x, weight, target)

    return linear_cross_entropy
