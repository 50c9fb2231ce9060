"""The linear layer of many rows: products of `matmul`, which has everything but the norm in its epilogue.

Weights in fp8 or int8 that ask for x in the same are products of 8-bit operands, whose scales are part of the epilogue.
Weights in MXFP4 that ask for x in fp8 become fp8 before.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashkernel.blocks.fp8 import FP8
from flashkernel.blocks.weight import Weight, rounded_activations
from flashkernel.ops.gemm import library
from flashkernel.ops.gemm.params import Biases, LinearParams, Weights
from flashkernel.ops.matmul import matmul
from flashkernel.ops.norm import rms_norm
from flashkernel.ops.quant import dequantize, quantize

_matmul: Any = matmul  # returns one tensor or two, depending on its arguments


def linear(
    x: Tensor, weight: Weights, bias: Biases = None, *, backend: str | None = None, **options: Any
) -> Tensor | tuple[Tensor, ...]:
    """As flashkernel.linear; `backend` is that of the products, and None lets `matmul` choose."""
    params = LinearParams(**options)
    if params.norm_weight is not None:
        x = normalized(x, params.norm_weight, params.norm_eps, params.norm_offset)
    single = isinstance(weight, (Tensor, Weight))
    weights: list[Any] = [weight] if single else list(weight)  # type: ignore[arg-type]
    biases = [] if bias is None else [bias] if isinstance(bias, Tensor) else list(bias)
    if params.gated or single:
        y = _product(x, weights, biases, params.residual, params, backend)
        return y if params.splits is None else y.split(list(params.splits), -1)
    return tuple([_product(x, [one], biases[at : at + 1], None, params, backend) for at, one in enumerate(weights)])


def normalized(x: Tensor, norm_weight: Tensor, eps: float, offset: float) -> Tensor:
    """RMSNorm of x by an operator of its own, which has its own backward pass."""
    backend = "torch" if x.device.type == "cpu" else "triton"
    return rms_norm(x, norm_weight, eps=eps, offset=offset, backend=backend)  # type: ignore[return-value]


def rounded_to_fp8(x: Tensor, weight: Weight, gradients: bool) -> Tensor:
    """x rounded to the fp8 that a weight asks for, in its own dtype, for kernels that take it so."""
    if gradients:
        return rounded_activations(x, weight)
    return dequantize(*quantize(x, FP8, backend="triton"), dtype=x.dtype, backend="triton")


def _product(
    x: Tensor,
    weights: list[Any],
    biases: list[Tensor],
    residual: Tensor | None,
    params: LinearParams,
    backend: str | None,
) -> Tensor:
    """One output: of one weight, or of gate and up."""
    flat = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    out = None if params.out is None or not params.out.is_contiguous() else params.out.view(flat.shape[0], -1)
    if residual is not None:
        residual = out if residual is params.out and out is not None else residual.reshape(flat.shape[0], -1)
    options: dict[str, Any] = {
        "bias": None if not biases else biases[0] if len(biases) == 1 else biases, "residual": residual,
        "activation": params.activation, "packed": params.packed, "scale": params.scale, "out": out,
        "out_dtype": x.dtype if params.out_dtype is None else params.out_dtype, "backend": backend,
    }  # fmt: skip
    if isinstance(weights[0], Weight):
        y = _quantized_product(flat, weights[0], options)
    else:
        matrices = [weight.t() for weight in weights]
        y = _matmul(flat, matrices[0] if len(matrices) == 1 else matrices, **options)
    return params.out if out is not None else y.view(*x.shape[:-1], y.shape[-1])  # type: ignore[return-value]


def _quantized_product(x: Tensor, weight: Weight, options: dict[str, Any]) -> Tensor:
    """A product of x, quantized here with a scale for each row or each row's 128 columns, and a weight in 8 bits."""
    if weight.format == "mxfp4":
        weight = library.in_fp8(weight)
    assert weight.scales is not None
    data, x_scales = quantize(x, weight.data.dtype, "row" if weight.group_shape[1] == -1 else "group")
    return _matmul(data, weight.data.t(), a_scale=x_scales, b_scale=weight.scales.t(), **options)
