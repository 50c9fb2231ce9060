"""What the epilogue of a dense product reads and writes, as kernel arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flashkernel.core.arguments import unit_stride
from flashkernel.ops.matmul.params import MatmulParams, MatmulTensors


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
        )  # fmt: skip

    @staticmethod
    def of_gradient(activated: Tensor, z: Tensor, dz: Tensor, params: MatmulParams) -> EpilogueTensors:
        """Those of `MatmulDactKernels.dact`."""
        packed = params.packed if params.epilogue.gated else ""
        return EpilogueTensors(activated, ("", params.chain), packed, z=z, dz=dz)

    @property
    def pointers(self) -> tuple[Tensor | None, ...]:
        return self.c, self.z, self.dz, self.bias, self.up_bias, self.residual

    @property
    def strides(self) -> tuple[Any, ...]:
        """Of C, z, dz, the bias and the residual: batch and rows of each matrix, 0 for what is the same for all."""
        return (
            _matrix_strides(self.c), _matrix_strides(self.z), _matrix_strides(self.dz),
            0 if self.bias is None else self.bias.stride(0), _matrix_strides(self.residual),
        )  # fmt: skip

    @property
    def constants(self) -> dict[str, str]:
        return {"BEFORE": self.chains[0], "AFTER": self.chains[1], "PACKED": self.packed}


def _matrix_strides(x: Tensor | None) -> tuple[int, int]:
    return (0, 0) if x is None else (0 if x.shape[0] == 1 else x.stride(0), x.stride(1))
