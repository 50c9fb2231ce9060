"""Matrix products by torch's own operators: cuBLAS, or the CPU's BLAS."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks.epilogue import Bias, Epilogue, Operands, standard
from flashkernel.blocks.fp8 import scaled_mm_takes
from flashkernel.ops.matmul.reference import default_dtype, dequantized


def matmul(
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    scale: float = 1.0,
    out_dtype: torch.dtype | None = None,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
) -> Tensor:
    dtype = default_dtype(a.dtype) if out_dtype is None else out_dtype
    chain = Epilogue(standard(bias is not None, activation, scale, residual is not None))
    rounds_late = all(isinstance(one, Bias) for one in chain.pieces)  # nothing that would show a rounded product
    if a.dtype.itemsize > 1:
        product = torch.matmul(a, b) if rounds_late or a.dtype.itemsize > 2 else _wide_product(a, b)
    elif a_scale is None or b_scale is None:
        product = torch.matmul(a.float(), b.float())
    elif _scaled_mm_serves(a, b, a_scale, b_scale):
        vectors = (a_scale.contiguous(), b_scale.contiguous())
        product = torch._scaled_mm(a, b, *vectors, out_dtype=torch.bfloat16)
    else:
        product = torch.matmul(dequantized(a, a_scale), dequantized(b, b_scale))
    if not chain.pieces:
        return product.to(dtype)
    return chain.run((product,), Operands(() if bias is None else (bias,), residual)).to(dtype)


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
