"""Scales of a dense product, and what its epilogue reads and writes, as kernel arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashkernel.blocks.dropout import seed_word
from flashkernel.blocks.epilogue import Epilogue
from flashkernel.blocks.fp8 import FP8
from flashkernel.core import device, env
from flashkernel.core.arguments import unit_stride
from flashkernel.ops.matmul.params import MatmulParams, MatmulTensors


class Scales(NamedTuple):
    """Scales of A, B and up, in float32; None where operands are not scaled."""

    a: Any
    b: Any
    up: Any


class EpiloguePointers(NamedTuple):
    """What an epilogue reads and writes beside C, as kernels take it; `EpilogueTensors` says what each is."""

    z: Any
    dz: Any
    bias: Any
    up_bias: Any
    residual: Any
    seed: Any  # a `seed_word`
    device_seed: Any  # or the address of a number
    out_scale: Any
    block_scales: Any


class EpilogueStrides(NamedTuple):
    """Strides of the batch and of the rows, 0 for what is the same for all; of the biases that of their elements."""

    c_batch: Any
    c_row: Any
    z_batch: Any
    z_row: Any
    dz_batch: Any
    dz_row: Any
    bias: Any
    residual_batch: Any
    residual_row: Any
    out_scale_batch: Any
    out_scale_row: Any
    block_scales_batch: Any
    block_scales_row: Any


class EpilogueTraits(NamedTuple):
    """What the epilogue of a kernel is compiled for.

    BEFORE is the part of the chain ahead of the activation; AFTER is the activation and what follows it. PACKED says
    how z holds gate and up; without a gate it is "".
    """

    BEFORE: str
    AFTER: str
    PACKED: str
    C_TMA: bool  # C is stored by its descriptor
    PART_N: int  # columns of a tile that are worked on at a time, to save registers


@dataclass(frozen=True)
class EpilogueTensors:
    """`store.store_result` says what each is for.

    Attributes:
        c: [batch, M, N] with unit stride along N.
        chains: `Epilogue.around_activation`.
        packed: How z holds gate and up; "" where it holds one value for each of C.
        gated: There are two products, gate and up.
        z: The preactivation, written, or read where there is a dz. Unit stride along its columns.
        dz: Its gradient, of z's shape.
        bias: [N].
        up_bias: [N], with the bias's stride.
        residual: [batch or 1, M, N] with unit stride along N.
        seed: `seed_arguments`.
        out_scale: float32 [batch or 1, M or 1, 1].
        block_scales: float32 [batch, M, N / 128], written.
    """

    c: Tensor
    chains: tuple[str, str]
    packed: str = ""
    gated: bool = False
    z: Tensor | None = None
    dz: Tensor | None = None
    bias: Tensor | None = None
    up_bias: Tensor | None = None
    residual: Tensor | None = None
    seed: tuple[int | None, Tensor | None] = (None, None)
    out_scale: Tensor | None = None
    block_scales: Tensor | None = None

    @staticmethod
    def of(c: Tensor, params: MatmulParams, given: MatmulTensors) -> EpilogueTensors:
        """Those of `MatmulKernels.forward`."""
        bias, up_bias = given.bias, given.up_bias
        if bias is not None and up_bias is not None and bias.stride() != up_bias.stride():
            bias, up_bias = bias.contiguous(), up_bias.contiguous()
        gated = given.up is not None
        return EpilogueTensors(
            c, params.epilogue.around_activation, params.packed if gated else "", gated, given.preactivation, None,
            bias, up_bias, None if given.residual is None else unit_stride(given.residual),
            seed_arguments(params.epilogue, given.seed), given.out_scale, given.block_scales,
        )  # fmt: skip

    @staticmethod
    def of_gradient(activated: Tensor, z: Tensor, dz: Tensor, params: MatmulParams) -> EpilogueTensors:
        """Those of `MatmulDactKernels.dact`."""
        packed = params.packed if params.epilogue.gated else ""
        return EpilogueTensors(activated, ("", params.chain), packed, z=z, dz=dz)

    @property
    def pointers(self) -> EpiloguePointers:
        return EpiloguePointers(
            self.z, self.dz, self.bias, self.up_bias, self.residual, *self.seed, self.out_scale, self.block_scales
        )

    @property
    def strides(self) -> EpilogueStrides:
        return EpilogueStrides(
            *_matrix_strides(self.c), *_matrix_strides(self.z), *_matrix_strides(self.dz),
            0 if self.bias is None else self.bias.stride(0), *_matrix_strides(self.residual),
            *_matrix_strides(self.out_scale), *_matrix_strides(self.block_scales),
        )  # fmt: skip

    def traits(self, c_tma: bool, part_n: int) -> EpilogueTraits:
        return EpilogueTraits(*self.chains, self.packed, c_tma, part_n)


def seed_arguments(epilogue: Epilogue, seed: int | Tensor) -> tuple[int | None, Tensor | None]:
    """What dropout follows from: a scrambled word, or the address of a number on the device; None where unused."""
    if epilogue.dropout is None:
        return None, None
    return (None, seed) if isinstance(seed, Tensor) else (seed_word(seed), None)


def fp8_bytes(x: Tensor) -> Tensor:
    """An fp8 output as bytes, where kernels cannot convert to fp8: before sm_89, and in Triton's interpreter."""
    if x.dtype != FP8 or (device.properties(x.device).arch >= 89 and not env.interpreting()):
        return x
    return x.view(torch.uint8)


def _matrix_strides(x: Tensor | None) -> tuple[int, int]:
    return (0, 0) if x is None else (0 if x.shape[0] == 1 else x.stride(0), 0 if x.shape[1] == 1 else x.stride(1))
