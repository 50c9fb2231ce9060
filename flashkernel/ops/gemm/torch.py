"""The linear layer by torch's own operators: cuBLAS (or the CPU's BLAS) for the product, an operator for each piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flashkernel.blocks.epilogue import Epilogue, Operands, standard
from flashkernel.blocks.gate_up import split_gate_up
from flashkernel.ops.gemm.params import LinearParams


def linear(
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    bias: Tensor | Sequence[Tensor] | None = None,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, ...]:
    params = LinearParams(**options)
    dtype = x.dtype if params.out_dtype is None else params.out_dtype
    if norm_weight is not None:
        x = normalised(x, norm_weight, params.norm_eps, params.norm_offset)
    if (
        params.activation is None
        and params.scale == 1.0
        and isinstance(weight, Tensor)
        and (bias is None or _fits(bias, x))
    ):
        # Most layers: on a CPU, assembling a chain takes longer than running it.
        product = F.linear(x, weight, bias if isinstance(bias, Tensor) else None)
        y = (product if residual is None else product + residual).to(dtype)
        return y if params.splits is None else y.split(list(params.splits), -1)
    weights = [weight] if isinstance(weight, Tensor) else list(weight)
    biases = [] if bias is None else [bias] if isinstance(bias, Tensor) else list(bias)
    fused = len(biases) > 0 and all([vector.dtype == x.dtype for vector in biases])  # noqa: C419  dynamo wants a list
    products = [
        F.linear(x, matrix, biases[index] if fused else None) for index, matrix in enumerate(weights)
    ]  # fmt: skip
    chain = Epilogue(standard(len(biases) > 0 and not fused, params.activation, params.scale, residual is not None))
    if chain.gated:
        alone = len(products) == 1
        pair = split_gate_up(products[0], params.packed, -1) if alone else (products[0], products[1])
        vectors = split_gate_up(biases[0], params.packed, 0) if alone and biases else tuple(biases)
        return chain.run(pair, Operands(vectors, residual)).to(dtype)
    outputs = [
        chain.run((product,), Operands(tuple(biases[index : index + 1]), residual)).to(dtype)
        for index, product in enumerate(products)
    ]
    if params.splits is not None:
        return outputs[0].split(list(params.splits), -1)
    return outputs[0] if isinstance(weight, Tensor) else tuple(outputs)


def _fits(bias: Tensor | Sequence[Tensor], x: Tensor) -> bool:
    return isinstance(bias, Tensor) and bias.dtype == x.dtype


def normalised(x: Tensor, norm_weight: Tensor, eps: float, offset: float) -> Tensor:
    """RMSNorm of x, in float32 and rounded once."""
    if offset == 0.0 and norm_weight.dtype == x.dtype:
        return F.rms_norm(x, x.shape[-1:], norm_weight, eps)
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(wide), x.shape[-1:], norm_weight.to(wide) + offset, eps).to(x.dtype)
