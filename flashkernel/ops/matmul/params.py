"""The options of a matrix product, as every kernel module sees them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashkernel.blocks.epilogue import Epilogue


@dataclass(frozen=True)
class MatmulParams:
    """What a product computes beyond its operands.

    Attributes:
        out_dtype: The output's dtype. Sums are in float32 (int32 for int8 operands).
        chain: The text of an epilogue (`Epilogue.parse(chain)`), applied to the float32 product before it is rounded:
            bias, activation, scale, residual, in that order, each where given.
        scaling: How a_scale and b_scale multiply the product, ahead of the epilogue.
            "": there are none.
            "row": a_scale is [batch or 1, M or 1, 1] and b_scale [batch or 1, 1, N or 1]. A size of 1 stands for one
            scale for all (per tensor); they multiply the finished sum.
            "block": a_scale is [batch or 1, M, K / 128] and b_scale [batch or 1, K / 128, N / 128], rounded up. They
            multiply the sum of each 128 elements of K, and these products are added in float32.
        tf32: float32 operands may be rounded to tf32 (torch.backends.cuda.matmul.allow_tf32); else "tf32x3" or exact.
    """

    out_dtype: torch.dtype
    chain: str = ""
    scaling: str = ""
    tf32: bool = False

    @property
    def epilogue(self) -> Epilogue:
        return Epilogue.parse(self.chain)
