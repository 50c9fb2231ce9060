"""What kernel modules of the losses offer: `CrossEntropyKernels` and `LinearCrossEntropyKernels`."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from flashkernel.ops.loss.params import LinearLossInputs, LossParams


class CrossEntropyKernels(Protocol):
    """A module such as `triton`. Without `backward`, calls that need gradients go to another backend."""

    def forward(self, logits: Tensor, target: Tensor, params: LossParams) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (loss, lse, count) of logits (rows, classes): the lse are float32 (rows,), count the
        targets that are not ignored."""

    def backward(
        self, dloss: Tensor, logits: Tensor, target: Tensor, lse: Tensor, count: Tensor,
        params: LossParams,
    ) -> Tensor:  # fmt: skip
        """Returns dlogits."""


class LinearCrossEntropyKernels(Protocol):
    """A module such as `linear`. Without `backward`, calls that need gradients go to another backend."""

    def forward(
        self, inputs: LinearLossInputs, params: LossParams, wanted: tuple[bool, bool, bool]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Returns (loss, lse, count, dx, dweight, dbias) of x (rows, hidden). count are the targets that are not
        ignored. The gradients are for a loss gradient of one; in float16, those of the mean times min(count,
        HALF_SCALE). Those that are not wanted are empty."""

    def backward(
        self, dloss: Tensor, inputs: LinearLossInputs, lse: Tensor, params: LossParams, wanted: tuple[bool, bool, bool]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (dx, dweight, dbias) for a loss per row."""

    def scaled(
        self, values: Tensor, factor: Tensor, count: Tensor | None, summed: bool, in_place: bool
    ) -> Tensor:  # fmt: skip
        """Returns values * factor, where factor has one element; if there is a count, divided by min(count,
        HALF_SCALE), and if `summed` multiplied by the count."""


PROTOCOLS = {"cross_entropy": CrossEntropyKernels, "linear_cross_entropy": LinearCrossEntropyKernels}
