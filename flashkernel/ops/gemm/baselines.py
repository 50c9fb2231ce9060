"""What the linear layer is timed against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flashkernel.core.op import Case, Op
from flashkernel.ops.gemm.named import gathered


def eager(op: Op, case: Case) -> Callable[..., Any]:
    """cuBLAS and torch's operators in the input's dtype, as model code writes them: a product for each weight."""

    def linear(
        x: Tensor,
        weight: Tensor | list[Tensor],
        bias: Tensor | list[Tensor] | None = None,
        residual: Tensor | None = None,
        norm_weight: Tensor | None = None,
        activation: str | None = None,
    ) -> Any:
        if norm_weight is not None:
            x = F.rms_norm(x, x.shape[-1:], norm_weight, 1e-6)
        weights = weight if isinstance(weight, list) else [weight]
        biases = bias if isinstance(bias, list) else [bias] * len(weights)
        outputs = [F.linear(x, matrix, vector) for matrix, vector in zip(weights, biases)]
        if activation == "swiglu":
            return F.silu(outputs[0]) * outputs[1]
        if activation is not None:
            outputs = [_ACTIVATIONS[activation](output) for output in outputs]
        if residual is not None:
            return outputs[0] + residual
        return tuple(outputs) if len(outputs) > 1 else outputs[0]

    def run(x: Tensor, weight: Tensor, **given: Any) -> Any:
        return gathered(linear, x, weight, given)

    if set(case.options) - {"activation"}:
        raise ValueError("written for the benchmark cases, whose only option is the activation")
    return run


def compiled(op: Op, case: Case) -> Callable[..., Any]:
    return torch.compile(eager(op, case), dynamic=False)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}
