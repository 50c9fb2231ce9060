"""The options of a cross-entropy, as every backend sees them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

HALF_SCALE = 256.0  # that float16 gradients of a mean are stored with, at most


class LossParams(NamedTuple):
    """`cross_entropy` documents the fields; a softcap of 0 means none."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float = 0.0
    reduction: str = "mean"

    def stored_scale(self, dtype: torch.dtype) -> float:
        """What gradients in `dtype`, stored for a loss gradient of one, are multiplied by at most.

        A mean divides the gradient of each logit by the number of targets, which leaves little of it in float16, whose
        least number is 6e-8: a loss scaler multiplies only afterwards. They are stored times min(number, HALF_SCALE).
        """
        return HALF_SCALE if dtype == torch.float16 and self.reduction == "mean" else 1.0


class LinearLossInputs(NamedTuple):
    """The tensors of a linear layer with cross-entropy, as its kernels take them."""

    x: Tensor  # [rows, hidden]
    weight: Tensor  # [classes, hidden]
    bias: Tensor | None  # [classes]
    target: Tensor  # [rows]
