"""What a kernel module of the reductions offers: `ReduceKernels`, with or without the backward functions."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from flashkernel.ops.reduce.masks import MaskRows


class ReduceKernels(Protocol):
    """A module such as `triton` or `cuda`; x is (rows, width) with unit stride along the row, `kind` one of kinds.py.

    An operator whose backward function is missing goes to another backend for calls that need gradients.
    """

    def reduce(self, x: Tensor, weight: Tensor | None, kind: int) -> tuple[Tensor, Tensor]:
        """Returns (y, saved), both (rows,): saved is float32, and empty except for max and logsumexp."""

    def reduce_backward(self, dy: Tensor, x: Tensor, y: Tensor, saved: Tensor, kind: int) -> Tensor:
        """Returns dx of max or logsumexp."""

    def weighted_backward(
        self, dy: Tensor, x: Tensor, weight: Tensor, want_x: bool, want_weight: bool
    ) -> tuple[Tensor, Tensor]:
        """Returns (dx, dweight) of weighted_sum; the one that is not wanted is empty."""

    def softmax(self, x: Tensor, mask: MaskRows, scale: float, queries: int) -> Tensor:
        """Returns the softmax of scale * x; queries > 0 says causal."""

    def softmax_backward(self, dy: Tensor, y: Tensor, scale: float, queries: int) -> Tensor:
        """Returns dx of the softmax y."""


PROTOCOLS = dict.fromkeys(("sum", "mean", "max", "logsumexp", "softmax", "weighted_sum"), ReduceKernels)
