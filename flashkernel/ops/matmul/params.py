"""The options of a matrix product: as the composite backends see them, and as the kernel modules do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flashkernel.blocks.epilogue import Activation, Epilogue, Gate

Pair = tuple[Tensor, Tensor]  # of gate and up


@dataclass(frozen=True)
class MatmulOptions:
    """`matmul` documents the fields."""

    bias: Tensor | Pair | None = None
    residual: Tensor | None = None
    a_scale: Tensor | None = None
    b_scale: Tensor | None = None
    out_scale: Tensor | None = None
    activation: str | Activation | Gate | None = None
    packed: str = "halves"
    scale: float = 1.0
    dropout: float = 0.0
    seed: int | Tensor = 0
    out_dtype: torch.dtype | None = None
    out_quantize: str | None = None
    return_preactivation: bool = False


@dataclass(frozen=True)
class DactOptions:
    """`matmul_dact` documents the fields."""

    activation: str | Activation | Gate
    packed: str = "halves"
    dz_out: Tensor | None = None


class MatmulTensors(NamedTuple):
    """The tensors of a product beside A and B, as kernel modules take them.

    Attributes:
        up: [batch or 1, K, N], the second matrix of a gated product, whose first is B. A view with any strides.
        bias: [N] in any float dtype, any stride; given if the epilogue has one.
        up_bias: The same for `up`, in the bias's dtype and stride.
        residual: [batch or 1, M, N] in any float dtype, any strides; given if the epilogue has one.
        a_scale: float32, any strides; `MatmulParams.scaling` says which shape.
        b_scale: float32, any strides.
        up_scale: The same for `up`.
        preactivation: None, or a contiguous tensor [batch, M, N] to write the preactivation to (product, scales and
            bias), rounded to its dtype. Of a gated product [batch, M, 2 N], packed as `MatmulParams.packed` says.
        out: Where C is written, [batch, M, N] in `MatmulParams.out_dtype` with unit stride along N; None: a new tensor.
            It may be the residual.
        seed: What dropout follows from, if the epilogue has it: a number, or one int64 on the device.
        out_scale: float32 [batch or 1, M or 1, 1], any strides: C is divided by it, and saturated.
        block_scales: float32 [batch, M, N / 128] (rounded up), contiguous, or None: C is quantized to fp8 in blocks of
            1 x 128, whose scales the kernel writes here.
    """

    up: Tensor | None = None
    bias: Tensor | None = None
    up_bias: Tensor | None = None
    residual: Tensor | None = None
    a_scale: Tensor | None = None
    b_scale: Tensor | None = None
    up_scale: Tensor | None = None
    preactivation: Tensor | None = None
    out: Tensor | None = None
    seed: int | Tensor = 0
    out_scale: Tensor | None = None
    block_scales: Tensor | None = None


class MatmulParams(NamedTuple):
    """What a product computes beyond its operands.

    Attributes:
        out_dtype: The output's dtype. Sums are in float32 (int32 for int8 operands).
        chain: The text of an epilogue (`Epilogue.parse(chain)`), applied to the float32 product before it is rounded:
            bias, activation, scale, dropout, residual, in that order, each where given.
        scaling: How a_scale and b_scale multiply the product, ahead of the epilogue.
            "": there are none.
            "row": a_scale is [batch or 1, M or 1, 1] and b_scale [batch or 1, 1, N or 1]. A size of 1 stands for one
            scale for all (per tensor); they multiply the finished sum.
            "block": a_scale is [batch or 1, M, K / 128] and b_scale [batch or 1, K / 128, N / 128], rounded up. They
            multiply the sum of each 128 elements of K, and these products are added in float32.
        tf32: float32 operands may be rounded to tf32 (torch.backends.cuda.matmul.allow_tf32); else "tf32x3" or exact.
        packed: How a stored preactivation of a gated product holds gate and up: "halves" or "interleaved".
    """

    out_dtype: torch.dtype
    chain: str = ""
    scaling: str = ""
    tf32: bool = False
    packed: str = "halves"

    @property
    def epilogue(self) -> Epilogue:
        return Epilogue.parse(self.chain)
