"""What a kernel module of linear offers: `LinearKernels`. The gradient is made of torch's matrix products."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from flashkernel.blocks.weight import Weight


class LinearKernels(Protocol):
    """A module such as `triton`."""

    def forward(
        self, x: Tensor, weights: list[Tensor] | list[Weight], biases: list[Tensor], residual: Tensor | None,
        norm_weight: Tensor | None, chain: str, eps: float, offset: float, dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        """Returns (rows, outputs) in `dtype`, those of all weights side by side; `chain` is the text of an epilogue.

        Weights are tensors in x's dtype, or quantized weights if the backend's `supports` takes their layouts.
        """


PROTOCOLS = {"linear": LinearKernels, "quantized_linear": LinearKernels}
