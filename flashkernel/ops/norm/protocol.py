"""What a kernel module of the norms offers: `NormKernels`, with or without `backward`."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class NormKernels(Protocol):
    """A module such as `triton`. Without `backward`, calls that need gradients go to another backend."""

    def forward(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, eps: float,
        offset: float, rms: bool, shape: torch.Size,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """Returns (y, total, mean, rstd) of x (rows, width).

        y and total have `shape`, mean and rstd are float32 (rows,). total is x + residual, and empty without a
        residual; mean is empty with `rms`.
        """

    def backward(
        self, dy: Tensor, dtotal: Tensor | None, total: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor,
        bias_dtype: torch.dtype | None, offset: float, rms: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Returns (dx, dweight, dbias); a gradient without its parameter is empty."""


PROTOCOLS = {"rms_norm": NormKernels, "layer_norm": NormKernels}
