"""What a kernel module of this package offers: `MatmulKernels`, `MatmulDactKernels` and `GroupedMatmulKernels`.

There is no backward function: gradients are products of the same kernels (library.py), dA = dC B^T and dB = A^T dC,
where the transposes are views.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from flashkernel.ops.matmul.params import GroupedParams, MatmulParams, MatmulTensors


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


class GroupedMatmulKernels(Protocol):
    """A module such as `triton`."""

    def grouped_forward(
        self, x: Tensor, weights: Tensor, offsets: Tensor, params: GroupedParams, gather: Tensor | None,
        scatter: Tensor | None, row_weights: Tensor | None, bias: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Returns y [params.out_rows, N]: y[scatter[r]] = row_weights[r] * (x[gather[r]] weights[g] + bias[g]).

        Row r belongs to group g where offsets[g] <= r < offsets[g + 1]. Rows of y that no r writes are zero.

        Args:
            x: [tokens, K], a view with any strides.
            weights: [groups, K, N] in x's dtype, a view with any strides.
            offsets: int32 [groups + 1], contiguous, not decreasing. It stays on the GPU: no host sync.
            params: Output dtype and rows.
            gather: int32 [rows], contiguous, or None: row r of x is read.
            scatter: int32 [rows], contiguous, all different, or None: row r of y is written.
            row_weights: float32 [rows], contiguous, or None.
            bias: [groups, N] in any float dtype, any strides, or None.
        """

    def grouped_weight_gradient(
        self, x: Tensor, dy: Tensor, offsets: Tensor, params: GroupedParams, gather: Tensor | None,
        scatter: Tensor | None, row_weights: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Returns dW [groups, K, N]: the sum over r of group g of x[gather[r]]^T (row_weights[r] * dy[scatter[r]]).

        An empty group's gradient is zero. params.out_rows is not used.
        """


PROTOCOLS = {"matmul": MatmulKernels, "matmul_dact": MatmulDactKernels, "grouped_matmul": GroupedMatmulKernels}
