"""What the linear layer is timed against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flashkernel.blocks.fp8 import FP8, block_scaled_mm_missing, cublas_block_scales, quantize_fp8_groups
from flashkernel.blocks.weight import GRANULARITIES, Weight
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

    in_fp8 = case.options.get("activation_dtype") == FP8
    function = _linear_in_fp8 if in_fp8 else linear

    def run(x: Tensor, weight: Tensor, **given: Any) -> Any:
        return gathered(function, x, weight, given)

    allowed = {"activation", "activation_dtype"} if in_fp8 else {"activation"}
    if set(case.options) - allowed or (in_fp8 and "up" in case.present):
        raise ValueError("written for the benchmark cases, whose only options are the activation and x in fp8")
    missing = block_scaled_mm_missing() if case.axes.get("scales") == "block" else None
    if missing is not None:
        raise ValueError(missing)
    return run


def _linear_in_fp8(
    x: Tensor, weight: Weight, bias: Tensor | None = None, residual: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """x quantized as the weight asks for it, then cuBLAS's fp8 product, with fast accumulation as the kernels have it
    (block scales are added in float32), then torch's operators."""
    assert weight.scales is not None
    data, scales = quantize_fp8_groups(x.reshape(-1, x.shape[-1]), weight.activation_group)
    columns = weight.scales.t()
    blocks = weight.group_shape == GRANULARITIES["block"]
    if blocks:
        scales, columns = cublas_block_scales(scales, columns)
    elif columns.numel() == 1:
        columns = columns.expand(1, weight.shape[0])
    y = torch._scaled_mm(
        data, weight.data.t(), scales, columns if blocks else columns.contiguous(), out_dtype=x.dtype,
        use_fast_accum=not blocks,
    )  # fmt: skip
    y = y.view(*x.shape[:-1], -1) if bias is None else y.view(*x.shape[:-1], -1) + bias
    if activation == "swiglu":
        gate, up = y.chunk(2, -1)
        y = F.silu(gate) * up
    elif activation is not None:
        y = _ACTIVATIONS[activation](y)
    return y if residual is None else y + residual


def compiled(op: Op, case: Case) -> Callable[..., Any]:
    return torch.compile(eager(op, case), dynamic=False)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}
