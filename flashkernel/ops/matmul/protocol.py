"""What a kernel module of this package offers: `MatmulKernels` and `GroupedMatmulKernels`.

There is no backward function: gradients are products of the same kernels (library.py), dA = dC B^T and dB = A^T dC,
where the transposes are views.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from flashkernel.ops.matmul.params import GroupedParams, MatmulParams


class MatmulKernels(Protocol):
    """A module such as `triton` or `hopper`."""

    def forward(
        self, a: Tensor, b: Tensor, params: MatmulParams, bias: Tensor | None, residual: Tensor | None,
        a_scale: Tensor | None, b_scale: Tensor | None, preactivation: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Returns C [batch, M, N], contiguous, in params.out_dtype: epilogue(A B).

        Args:
            a: [batch or 1, M, K], a view with any strides.
            b: [batch or 1, K, N] in a's dtype, a view with any strides. A weight (N, K) comes as its transpose, with
                stride 1 along K. batch is the larger of the two first sizes.
            params: Output dtype, epilogue, scaling.
            bias: [N] in any float dtype, any stride; given if the epilogue has one.
            residual: [batch or 1, M, N] in any float dtype, any strides; given if the epilogue has one.
            a_scale: float32, any strides; `params.scaling` says which shape.
            b_scale: float32, any strides.
            preactivation: None, or an empty contiguous tensor [batch, M, N]. The kernel writes the value that goes into
                the activation (product, scales and bias), rounded to its dtype, for the backward pass.
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


PROTOCOLS = {"matmul": MatmulKernels, "grouped_matmul": GroupedMatmulKernels}
