"""What a kernel module of grouped products offers.

The gradient of x is a product of `grouped_forward`, with transposed weights.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from flashkernel.ops.matmul.grouped.params import GroupedParams, GroupedTensors


class GroupedMatmulKernels(Protocol):
    """A module such as `triton` or `hopper`."""

    def grouped_forward(
        self, x: Tensor, weights: Tensor, offsets: Tensor, params: GroupedParams, tensors: GroupedTensors
    ) -> Tensor:
        """Returns y [params.out_rows, columns]: y[scatter[r]] = row_weights[r] * activation(z[r]).

        z[r] = x[gather[r]] weights[g] + bias[g], where row r belongs to group g: offsets[g] <= r < offsets[g + 1]. Rows
        of y that no r writes are zero. There are as many columns as z has; half as many with a gate.

        Args:
            x: [tokens, K], a view with any strides.
            weights: [groups, K, N] in x's dtype, a view with any strides.
            offsets: int32 [groups + 1], contiguous, not decreasing. It stays on the GPU: no host sync.
            params: Output dtype and rows, activation.
            tensors: Indices, row weights, bias and scales, and where z is written; `GroupedTensors` documents each.
        """

    def grouped_weight_gradient(
        self, x: Tensor, dz: Tensor, offsets: Tensor, params: GroupedParams, gather: Tensor | None
    ) -> Tensor:
        """Returns dW [groups, K, N]: the sum over the rows r of group g of x[gather[r]]^T dz[r].

        An empty group's gradient is zero. dz is [rows, N] with unit stride along N. Of params, the output dtype and
        tf32 are used.
        """


class GroupedWeightGradientKernels(Protocol):
    """The part of `GroupedMatmulKernels` that computes the weights' gradient alone."""

    def grouped_weight_gradient(
        self, x: Tensor, dz: Tensor, offsets: Tensor, params: GroupedParams, gather: Tensor | None
    ) -> Tensor:
        """As that of `GroupedMatmulKernels`."""


PROTOCOLS = {"grouped_matmul": GroupedMatmulKernels, "grouped_weight_gradient": GroupedWeightGradientKernels}
