"""What a kernel module of this package offers; grouped/protocol.py has that of grouped products.

There is no backward function: gradients are products of the same kernels (library.py), dA = dC B^T and dB = A^T dC,
where the transposes are views.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from flashkernel.ops.matmul.params import MatmulParams, MatmulTensors


class MatmulKernels(Protocol):
    """A module such as `triton` or `hopper`."""

    def forward(self, a: Tensor, b: Tensor, params: MatmulParams, tensors: MatmulTensors) -> Tensor:
        """Returns C [batch, M, N] in params.out_dtype: epilogue(A B). It is tensors.out, or else new and contiguous.

        Args:
            a: [batch or 1, M, K], a view with any strides.
            b: [batch or 1, K, N] in a's dtype, a view with any strides. A weight (N, K) comes as its transpose, with
                stride 1 along K. batch is the larger of the two first sizes. With a gate, the gate's matrix.
            params: Output dtype, epilogue, scaling.
            tensors: What the epilogue reads and writes; `MatmulTensors` documents each.
        """


class MatmulDactKernels(Protocol):
    """A module such as `triton` or `hopper`."""

    def dact(
        self, a: Tensor, b: Tensor, z: Tensor, dz: Tensor, activated: Tensor, params: MatmulParams
    ) -> None:  # fmt: skip
        """Writes dz = (A B) * activation'(z) and activated = activation(z).

        Args:
            a: [batch or 1, M, K], a view with any strides.
            b: [batch or 1, K, N] in a's dtype, a view with any strides.
            z: [batch, M, N], or of a gate [batch, M, 2 N], packed as params.packed says. Unit stride along its columns.
            dz: The same; it may be z itself.
            activated: [batch, M, N], contiguous.
            params: The chain is the activation or gate alone.
        """


PROTOCOLS = {"matmul": MatmulKernels, "matmul_dact": MatmulDactKernels}
