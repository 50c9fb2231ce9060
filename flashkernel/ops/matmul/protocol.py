"""What a kernel module of this package offers; grouped/protocol.py has that of grouped products.

There is no backward function: gradients are products of the same kernels (library.py), dA = dC B^T and dB = A^T dC,
where the transposes are views.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from flashkernel.ops.matmul.params import MatmulParams


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


PROTOCOLS = {"matmul": MatmulKernels}
