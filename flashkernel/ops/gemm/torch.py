"""The linear layer by torch's own operators: cuBLAS (or the CPU's BLAS) for the product, an operator for each piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flashkernel.blocks import linear_cpp
from flashkernel.blocks.epilogue import Epilogue, Operands, standard
from flashkernel.blocks.fp8 import FP8, quantize_fp8_groups, scaled_mm_takes
from flashkernel.blocks.gate_up import split_gate_up
from flashkernel.blocks.weight import GRANULARITIES, Layout, Weight, rounded_activations
from flashkernel.core import cpp
from flashkernel.core.arguments import needs_gradients, shares_memory
from flashkernel.core.library import differentiable_once
from flashkernel.core.replay import call_torch
from flashkernel.ops.gemm import library
from flashkernel.ops.gemm.params import Biases, LinearParams, Weights
from flashkernel.ops.matmul import matmul


def linear(x: Tensor, weight: Weights, bias: Biases = None, **options: Any) -> Tensor | tuple[Tensor, ...]:
    params = LinearParams(**options)
    residual, norm_weight = params.residual, params.norm_weight
    dtype = x.dtype if params.out_dtype is None else params.out_dtype
    if norm_weight is not None:
        x = normalized(x, norm_weight, params.norm_eps, params.norm_offset)
    frozen = type(weight) is Weight and needs_gradients(x)  # dequantized again in the backward pass, not kept
    if type(weight) is Weight and weight.activation_dtype is None and not frozen:
        weight = dequantized(weight, x.dtype)
    if (
        params.activation is None
        and params.scale == 1.0
        and isinstance(weight, Tensor)
        and params.main_grads is None
        and (bias is None or _fits(bias, x))
    ):
        # Most layers: on a CPU, assembling a chain takes longer than running it.
        if params.out is not None and params.out is residual and bias is None and _adds_in_place(x, residual):
            residual.view(-1, residual.shape[-1]).addmm_(x.reshape(-1, x.shape[-1]), weight.t())
            return residual
        product = call_torch(F.linear, x, weight, bias if isinstance(bias, Tensor) else None)
        y = (product if residual is None else product + residual).to(dtype)
        return y if params.splits is None else y.split(list(params.splits), -1)
    single = isinstance(weight, (Tensor, Weight))
    weights: list[Any] = [weight] if single else list(weight)  # type: ignore[arg-type]
    biases = [] if bias is None else [bias] if isinstance(bias, Tensor) else list(bias)
    fused = len(biases) > 0 and all([vector.dtype == x.dtype for vector in biases])  # noqa: C419  dynamo wants a list
    mains = [None] * len(weights) if params.main_grads is None else list(params.main_grads)
    products = [
        matrix_product(x, matrix, biases[index] if fused else None, mains[index])
        for index, matrix in enumerate(weights)
    ]
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
    return outputs[0] if single else tuple(outputs)


def matrix_product(x: Tensor, matrix: Tensor | Weight, bias: Tensor | None, main_grad: Tensor | None = None) -> Tensor:
    """x matrix^T + bias. A quantized weight is dequantized first, unless it asks for x in fp8 and cuBLAS takes both.

    The matrix's gradient is added to `main_grad` where there is one.
    """
    if isinstance(matrix, Tensor):
        if main_grad is None:
            return F.linear(x, matrix, bias)
        found: Tensor = _AccumulatedProduct.apply(x, matrix, main_grad)
        return found if bias is None else found + bias
    if not _scaled_mm_serves(x, matrix):
        given = rounded_activations(x, matrix)
        if not needs_gradients(given):
            return F.linear(given, dequantized(matrix, x.dtype), bias)
        product: Tensor = _FrozenProduct.apply(given, bias, matrix.layout, *matrix.tensors)
        return product
    y = _ScaledProduct.apply(x, matrix.data, matrix.scales)
    return y if bias is None else y + bias


class _FrozenProduct(torch.autograd.Function):
    """x weight^T + bias of a quantized weight, which has no gradient.

    The weight's own tensors are kept for the backward pass, and the matrix is dequantized twice.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, layout: str, *tensors: Tensor) -> Tensor:
        ctx.layout = layout
        ctx.save_for_backward(*tensors)
        return F.linear(x, dequantized(Weight.from_tensors(tensors, layout), x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        tensors = ctx.saved_tensors  # once: activation checkpointing computes them when they are read
        weight = Weight.from_tensors(tensors, ctx.layout)
        (dy,), needs = gradients, ctx.needs_input_grad
        dx = dy @ dequantized(weight, dy.dtype) if needs[0] else None
        dbias = dy.sum_to_size(dy.shape[-1:]) if needs[1] else None
        return dx, dbias, None, *[None] * len(tensors)


def dequantized(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The matrix in `dtype`: on a GPU by one kernel and on a CPU by the C++ kernels, where they read the format."""
    if weight.device.type != "cpu":
        return library.dequantized(weight, dtype)
    plain = [type(one) is Tensor for one in weight.tensors]  # no subclass that something traces
    if torch.compiler.is_compiling() or not all(plain) or dtype == torch.float64 or cpp.can_compile() is not None:
        return weight.dequantize(dtype)
    layout, columns = Layout.parse(weight.layout), weight.shape[1]
    if linear_cpp.unsupported(layout) is not None or columns == 0 or columns % linear_cpp.BLOCK:
        return weight.dequantize(dtype)
    return linear_cpp.dequantized(weight).to(dtype)


class _AccumulatedProduct(torch.autograd.Function):
    """x weight^T, whose weight gradient is added to a buffer; the weight gets none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, main_grad: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.main_grad = main_grad  # not saved: other calls add to it before this one's backward pass
        return F.linear(x, weight)

    @staticmethod
    @differentiable_once("linear")
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        dy = dy.to(x.dtype)
        dx = torch.matmul(dy, weight) if ctx.needs_input_grad[0] else None
        if ctx.needs_input_grad[1]:
            flat, given = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
            matmul(flat.t(), given, residual=ctx.main_grad, out=ctx.main_grad)
        return dx, None, None


def _adds_in_place(x: Tensor, residual: Tensor) -> bool:
    if residual.dtype != x.dtype or residual.numel() == 0 or not residual.is_contiguous():
        return False
    return torch.compiler.is_compiling() or not shares_memory(x, residual)  # a traced function writes to no operand


def _scaled_mm_serves(x: Tensor, weight: Weight) -> bool:
    """Whether torch._scaled_mm computes the product of fp8 operands with a scale for each row of both."""
    return (
        weight.activation_dtype == FP8
        and weight.group_shape in (GRANULARITIES["tensor"], GRANULARITIES["row"])
        and x.dtype == torch.bfloat16  # the only output of row-wise scales
        and x.numel() > 0
        and scaled_mm_takes(weight.data.t())
    )


class _ScaledProduct(torch.autograd.Function):
    """x weight^T with x in fp8, a scale for each row; the gradient is that of the weight as it stands for a matrix."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, data: Tensor, scales: Tensor) -> Tensor:
        ctx.save_for_backward(data, scales)
        x_data, x_scales = quantize_fp8_groups(x.reshape(-1, x.shape[-1]), (1, -1))
        columns = scales.reshape(1, -1).expand(1, data.shape[0]).contiguous()
        y = torch._scaled_mm(x_data, data.t(), x_scales, columns, out_dtype=x.dtype)
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (dy,), (data, scales) = gradients, ctx.saved_tensors
        return dy @ (data.float() * scales).to(dy.dtype), None, None


def _fits(bias: Tensor | Sequence[Tensor], x: Tensor) -> bool:
    return isinstance(bias, Tensor) and bias.dtype == x.dtype


def normalized(x: Tensor, norm_weight: Tensor, eps: float, offset: float) -> Tensor:
    """RMSNorm of x, in float32 and rounded once."""
    if offset == 0.0 and norm_weight.dtype == x.dtype:
        return F.rms_norm(x, x.shape[-1:], norm_weight, eps)
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(wide), x.shape[-1:], norm_weight.to(wide) + offset, eps).to(x.dtype)
