"""What a kernel module of grouped products offers.

The gradient of x is a product of `grouped_forward`, with transposed weights.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from flashkernel.ops.matmul.grouped.params import GroupedParams


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


PROTOCOLS = {"grouped_matmul": GroupedMatmulKernels}
