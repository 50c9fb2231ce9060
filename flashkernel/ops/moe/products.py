"""Experts as grouped products, forward and backward; few tokens without gradients have kernels of their own.

    forward     h, z = activation(x[tokens] W_up^T + b_up), its argument    one launch; z is kept for the backward pass
                y = h W_down^T + b_down                                     one launch
                out[t] = sum of weights[t, j] y[positions[t, j]]            one launch
    backward    triton/gradients.py has the formulas: neither h nor y is stored

Rows are gathered as they are loaded. Sums over a token's rows are in the order of its slots: results repeat exactly.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashkernel.blocks.fp8 import FP8
from flashkernel.blocks.weight import Weight
from flashkernel.blocks.weight_formats.grouped import scales_of
from flashkernel.ops.gemm import in_fp8
from flashkernel.ops.matmul import grouped_matmul, grouped_weight_gradient
from flashkernel.ops.moe import tiles
from flashkernel.ops.moe.params import Experts
from flashkernel.ops.moe.routing.router import Routing
from flashkernel.ops.moe.triton import few_tokens, gradients
from flashkernel.ops.moe.triton.combine import combine
from flashkernel.ops.moe.triton.dequantize import dense
from flashkernel.ops.quant import quantize

_grouped: Any = grouped_matmul  # returns one tensor or two, depending on its arguments


def forward(
    x: Tensor, routing: Routing, experts: Experts, save: bool, backend: str | None
) -> tuple[Tensor, Tensor | None]:
    """(out [tokens, hidden], z or None); `ExpertProducts.forward` documents the arguments."""
    if not save and tiles.serves(x, routing, experts, backend):
        return tiles.forward(x, routing, experts), None
    if not save and few_tokens.serves(x, routing, experts):
        return few_tokens.forward(x, routing, experts), None
    if isinstance(experts.gate_up, Weight) and experts.gate_up.activation_dtype is not None:
        return _forward_in_fp8(x, routing, experts, backend), None
    gate_up, down = dense(experts.gate_up, x.dtype), dense(experts.down, x.dtype)
    found = _grouped(
        x, gate_up.transpose(1, 2), routing.offsets, gather=routing.tokens, bias=experts.gate_up_bias,
        activation=experts.piece, packed=experts.packed, return_preactivation=save, backend=backend,
    )  # fmt: skip
    hidden, z = found if save else (found, None)
    y = _grouped(hidden, down.transpose(1, 2), routing.offsets, bias=experts.down_bias, backend=backend)
    return combine(y, routing.positions, routing.weights, x.dtype), z


def _forward_in_fp8(x: Tensor, routing: Routing, experts: Experts, backend: str | None) -> Tensor:
    """[tokens, hidden], by products of 8-bit operands: x and what lies between the products are quantized by rows."""
    y = _product_in_fp8(
        x, experts.gate_up, routing, backend, gather=routing.tokens, bias=experts.gate_up_bias,
        activation=experts.piece, packed=experts.packed, out_dtype=x.dtype,
    )  # fmt: skip
    y = _product_in_fp8(y, experts.down, routing, backend, bias=experts.down_bias, out_dtype=x.dtype)
    return combine(y, routing.positions, routing.weights, x.dtype)


def _product_in_fp8(
    x: Tensor, weight: Tensor | Weight, routing: Routing, backend: str | None, **options: Any
) -> Tensor:
    assert isinstance(weight, Weight)
    if weight.format == "mxfp4":
        weight = in_fp8(weight)
    scales = scales_of(weight).flatten(1)
    data, x_scales = quantize(x, FP8, backend="triton")
    found: Tensor = _grouped(
        data, weight.data.transpose(1, 2), routing.offsets, x_scale=x_scales.flatten(),
        weight_scale=scales.flatten() if scales.shape[1] == 1 else scales, backend=backend, **options,
    )  # fmt: skip
    return found


def backward(
    dout: Tensor, x: Tensor, routing: Routing, experts: Experts, z: Tensor | None, in_place: bool, wanted: list[bool],
    backend: str | None,
) -> list[Tensor | None]:  # fmt: skip
    """Gradients of x, weights, gate_up, down and the biases; `ExpertProducts.backward` documents the arguments."""
    results: list[Tensor | None] = [None] * 6
    offsets, tokens = routing.offsets, routing.tokens
    gate_up, down = dense(experts.gate_up, x.dtype), dense(experts.down, x.dtype)
    if z is None:
        z = _grouped(
            x, gate_up.transpose(1, 2), offsets, gather=tokens, bias=experts.gate_up_bias, backend=backend
        )  # fmt: skip
        in_place = True
    dh = _grouped(dout, down, offsets, gather=tokens, backend=backend)
    row_weights = gradients.by_rows(routing.weights, routing.positions, tokens.shape[0])
    dz, weighted, row_products = gradients.expert_gradient(
        z, dh, row_weights, offsets, experts.piece.text, experts.gate, in_place, wanted[3]
    )
    del dh
    if wanted[1]:
        results[1] = gradients.slot_gradient(
            dout, row_products, routing.positions, routing.experts, experts.down_bias
        )  # fmt: skip
    if wanted[3] and weighted is not None:
        results[3] = _weight_gradient(dout, tokens, weighted, None, offsets, down, backend)
    del weighted
    if wanted[5]:
        results[5] = gradients.bias_gradient(dout, tokens, row_weights, offsets)
    if wanted[2]:
        results[2] = _weight_gradient(dz, None, x, tokens, offsets, gate_up, backend)
    if wanted[4]:
        results[4] = gradients.bias_gradient(dz, None, None, offsets)
    if wanted[0]:
        results[0] = combine(_grouped(dz, gate_up, offsets, backend=backend), routing.positions, None, x.dtype)
    return results


def _weight_gradient(
    left: Tensor, left_gather: Tensor | None, right: Tensor, right_gather: Tensor | None, offsets: Tensor,
    weight: Tensor, backend: str | None,
) -> Tensor:  # fmt: skip
    """[experts, out, in]: left^T right by groups, in the memory layout of the weight, so that nobody copies it.

    Kernels gather the first operand; rows of the second are copied ahead.
    """
    if weight.stride(1) == 1 and weight.stride(2) != 1:  # stored (in, out)
        left, left_gather, right, right_gather = right, right_gather, left, left_gather
        transposed = True
    else:
        transposed = False
    if right_gather is not None:
        right = right.index_select(0, right_gather)
    found = grouped_weight_gradient(left, right, offsets, gather=left_gather, backend=backend)
    return found.transpose(1, 2) if transposed else found
