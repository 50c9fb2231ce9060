"""What a kernel module of linear offers: `LinearKernels`. The gradient is made of torch's matrix products."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from flashkernel.blocks.weight import Weight
from flashkernel.ops.gemm.params import LinearExtras


class LinearKernels(Protocol):
    """A module such as `triton`."""

    def forward(
        self, x: Tensor, weights: list[Tensor] | list[Weight], biases: list[Tensor], extras: LinearExtras
    ) -> Tensor:
        """Returns (rows, outputs) in `extras.dtype`, those of all weights side by side.

        Weights are tensors in x's dtype, or quantized weights if the backend's `supports` takes their layouts.
        """


PROTOCOLS = {"linear": LinearKernels, "quantized_linear": LinearKernels}
