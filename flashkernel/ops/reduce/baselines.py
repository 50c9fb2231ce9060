"""What the reductions are timed against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashkernel.core.op import Case, Op
from flashkernel.ops.reduce.reference import visible_pairs


def eager(op: Op, case: Case) -> Callable[..., Any]:
    """Torch's own operator in the input's dtype, as a model would call it."""

    def softmax(x: Tensor, mask: Tensor | None = None, scale: float = 1.0, causal: bool = False) -> Tensor:
        scores = x if scale == 1.0 else x * scale
        visible = visible_pairs(x, mask, causal)
        if visible is not None:
            scores = scores.masked_fill(~visible, float("-inf"))
        return torch.softmax(scores, -1)

    functions: dict[str, Callable[..., Tensor]] = {
        "sum": lambda x, keepdim=False: x.sum(-1, keepdim=keepdim),
        "mean": lambda x, keepdim=False: x.mean(-1, keepdim=keepdim),
        "max": lambda x, keepdim=False: x.amax(-1, keepdim=keepdim),
        "logsumexp": lambda x, keepdim=False: torch.logsumexp(x, -1, keepdim=keepdim),
        "softmax": softmax,
        "weighted_sum": lambda x, weight: x @ weight,
    }
    return functions[op.name]


def compiled(op: Op, case: Case) -> Callable[..., Any]:
    if op.name == "weighted_sum":
        # Written as a reduction, so that the compiler fuses it instead of calling the matrix library.
        return torch.compile(lambda x, weight: (x.float() * weight).sum(-1).to(x.dtype), dynamic=False)
    return torch.compile(eager(op, case), dynamic=False)


def liger(op: Op, case: Case) -> Callable[..., Any]:
    from liger_kernel.transformers import functional as liger_functional

    if case.present or case.options:
        raise ValueError("Liger's softmax is plain: no mask, no scale, no causality")
    return lambda x: liger_functional.liger_softmax(x)
