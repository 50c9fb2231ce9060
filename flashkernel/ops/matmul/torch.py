"""Matrix products by torch's own operators: cuBLAS, or the CPU's BLAS."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks.epilogue import Bias, Epilogue, Gate, Operands, activation_piece, standard
from flashkernel.blocks.fp8 import FP8, scaled_mm_takes
from flashkernel.blocks.gate_up import join_gate_up, split_gate_up
from flashkernel.core.replay import call_torch
from flashkernel.ops.matmul.params import DactOptions, MatmulOptions, Pair
from flashkernel.ops.matmul.reference import default_dtype, dequantized, kept_elements, stored


def matmul(a: Tensor, b: Tensor | Pair, **options: Any) -> Tensor | tuple[Tensor, ...]:
    params = MatmulOptions(**options)
    bias, residual = params.bias, params.residual
    chain = Epilogue(standard(bias is not None, params.activation, params.scale, residual is not None, params.dropout))
    # Nothing that would show a rounded product.
    rounds_late = all([isinstance(one, Bias) for one in chain.pieces])  # noqa: C419  dynamo wants a list
    rounds_late = rounds_late and params.out_quantize is None and params.out_dtype != FP8
    matrices = (b,) if isinstance(b, Tensor) else tuple(b)
    products = tuple([_product(a, matrix, params.a_scale, params.b_scale, rounds_late) for matrix in matrices])
    biases = () if bias is None else (bias,) if isinstance(bias, Tensor) else tuple(bias)
    if chain.gated and len(products) == 1:
        products = split_gate_up(products[0], params.packed)
        biases = split_gate_up(biases[0], params.packed) if biases else ()
    kept = kept_elements(products[0], params) if params.dropout > 0 else None
    operands = Operands(biases, residual, kept)
    values = chain.before_activation.values(products, operands)
    kept_dtype = default_dtype(a.dtype)
    results = stored(chain.from_activation.run(values, operands), kept_dtype, params)
    if params.return_preactivation:
        z = values[0] if len(values) == 1 else join_gate_up(values[0], values[1], params.packed)
        results = (*results, z.to(kept_dtype))
    return results if len(results) > 1 else results[0]


def matmul_dact(a: Tensor, b: Tensor, preactivation: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    params = DactOptions(**options)
    packed, dz_out, piece = params.packed, params.dz_out, activation_piece(params.activation)
    assert piece is not None
    gradient = torch.matmul(a, b) if a.dtype.itemsize > 2 else _wide_product(a, b)
    z = preactivation.to(gradient.dtype)
    values = split_gate_up(z, packed) if isinstance(piece, Gate) else (z,)
    value = piece.run(values, Operands())[0].to(preactivation.dtype)
    gradients = [one.to(preactivation.dtype) for one in piece.pull_back(values, (gradient,), Operands())]
    if len(gradients) == 1:
        dz = gradients[0]
    elif dz_out is None:
        dz = join_gate_up(gradients[0], gradients[1], packed)
    else:
        for target, one in zip(split_gate_up(dz_out, packed), gradients):
            target.copy_(one)
        return dz_out, value
    return dz if dz_out is None else dz_out.copy_(dz), value


def _product(a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, rounds_late: bool) -> Tensor:
    """A B with its scales; in float32 unless `rounds_late`."""
    if a.dtype.itemsize > 1:
        return call_torch(torch.matmul, a, b) if rounds_late or a.dtype.itemsize > 2 else _wide_product(a, b)
    if a_scale is None or b_scale is None:
        return torch.matmul(a.float(), b.float())
    if _scaled_mm_serves(a, b, a_scale, b_scale):
        return torch._scaled_mm(a, b, a_scale.contiguous(), b_scale.contiguous(), out_dtype=torch.bfloat16)
    return torch.matmul(dequantized(a, a_scale), dequantized(b, b_scale))


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """A B of 16-bit operands in float32, not rounded."""
    if a.is_cuda and a.numel() > 0 and b.numel() > 0:
        found: Tensor = _WideProduct.apply(a, b)
        return found
    return torch.matmul(a.float(), b.float())


class _WideProduct(torch.autograd.Function):
    """cuBLAS's float32 sums of 16-bit operands; torch.mm(out_dtype=) has no gradient of its own in all versions."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        if a.ndim == b.ndim == 2:
            return torch.mm(a, b, out_dtype=torch.float32)
        batch = max(x.shape[0] if x.ndim == 3 else 1 for x in (a, b))
        left, right = (x.expand(batch, *x.shape[-2:]) for x in (a, b))
        return torch.bmm(left, right, out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:  # type: ignore[override]
        a, b = ctx.saved_tensors
        dz = gradient.to(a.dtype)
        da = torch.matmul(dz, b.mT).sum_to_size(a.shape) if ctx.needs_input_grad[0] else None
        db = torch.matmul(a.mT, dz).sum_to_size(b.shape) if ctx.needs_input_grad[1] else None
        return da, db


def _scaled_mm_serves(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor) -> bool:
    """Whether cuBLAS has the product: FP8 matrices of aligned sizes, A by rows and B by columns, scales of one kind."""
    kinds = {(a_scale.numel() == 1, b_scale.numel() == 1)}
    each = a_scale.shape[-2:] == (a.shape[-2], 1) and b_scale.shape[-2:] == (1, b.shape[-1])
    return (
        scaled_mm_takes(b)
        and a.ndim == a_scale.ndim == b_scale.ndim == 2
        and a.numel() > 0
        and a.stride(1) == 1
        and a.stride(0) % 16 == 0
        and (kinds == {(True, True)} or each)
    )
