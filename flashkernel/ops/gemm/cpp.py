"""The linear layer of quantized weights on a CPU, by the C++ kernels of blocks/cpp. Forward only.

Bias, SwiGLU and residual are part of the product; other epilogues are torch's, on float32 products. Many rows of x that
are not rounded to int8 go through the CPU's BLAS, with the weight dequantized a slice at a time.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flashkernel.blocks.epilogue import Bias, Epilogue, Gate, Operands, Residual
from flashkernel.blocks.linear_cpp import DTYPES, GEMM_ROWS, LinearCall, dequantized
from flashkernel.blocks.weight import Weight
from flashkernel.ops.gemm.params import LinearExtras
from flashkernel.ops.gemm.torch import normalized

_SLICE_BYTES = 1 << 20  # of a dequantized slice, which stays in the cache


def forward(x: Tensor, weights: list[Weight], biases: list[Tensor], extras: LinearExtras) -> Tensor:
    residual, norm_weight, chain, _, eps, offset, dtype = extras
    if dtype not in DTYPES or (residual is not None and residual.dtype not in DTYPES):
        residual = None if residual is None else residual.float()
        return forward(x, weights, biases, extras._replace(residual=residual, dtype=torch.float32)).to(dtype)
    epilogue = Epilogue.parse(chain)
    gated = epilogue.gated
    outputs = weights[0].shape[0] if gated else sum([weight.shape[0] for weight in weights])
    out = torch.empty((x.shape[0], outputs), dtype=dtype, device=x.device)
    if out.numel() == 0 or x.is_meta:  # meta: no memory to read
        return out
    by_gemm = x.shape[0] >= GEMM_ROWS and any(weight.activation_dtype is None for weight in weights)
    if by_gemm or not _fused(epilogue, weights):
        if norm_weight is not None and by_gemm:
            x, norm_weight = normalized(x, norm_weight, eps, offset), None
        products = [_product(x, weight, norm_weight, eps, offset, by_gemm) for weight in weights]
        return out.copy_(_run(epilogue, products, biases, residual))
    if gated:
        bias, up_bias = biases if biases else (None, None)
        return LinearCall(weights[0], weights[1], bias, up_bias, norm_weight, eps, offset)(x, residual, out)
    first = 0
    for index, weight in enumerate(weights):
        call = LinearCall(weight, None, biases[index] if biases else None, None, norm_weight, eps, offset)
        call(x, residual, out[:, first : first + weight.shape[0]])
        first += weight.shape[0]
    return out


def _fused(epilogue: Epilogue, weights: list[Weight]) -> bool:
    """Whether the kernels compute the epilogue."""
    gates = [piece for piece in epilogue.pieces if not isinstance(piece, (Bias, Residual))]
    if not gates:
        return True
    alike = len(weights) == 2 and weights[0].layout == weights[1].layout
    return alike and len(gates) == 1 and isinstance(gates[0], Gate) and gates[0].kind == "silu"


def _product(x: Tensor, weight: Weight, norm_weight: Tensor | None, eps: float, offset: float, by_gemm: bool) -> Tensor:
    """norm(x) weight^T in float32."""
    if not by_gemm or weight.activation_dtype is not None:
        return LinearCall(weight, None, None, None, norm_weight, eps, offset, torch.float32)(x)
    rows, columns = weight.shape
    step, wide = max(1, _SLICE_BYTES // (4 * columns)), x.float()
    out = torch.empty((x.shape[0], rows), device="cpu")
    for first in range(0, rows, step):
        count = min(step, rows - first)
        out[:, first : first + count] = F.linear(wide, dequantized(weight, first, count))
    return out


def _run(epilogue: Epilogue, products: list[Tensor], biases: list[Tensor], residual: Tensor | None) -> Tensor:
    if epilogue.gated:
        return epilogue.run((products[0], products[1]), Operands(tuple(biases), residual))
    return torch.cat(
        [
            epilogue.run((product,), Operands(tuple(biases[index : index + 1]), residual))
            for index, product in enumerate(products)
        ],
        -1,
    )
