"""The options of a cross-entropy, as every backend sees them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

HALF_SCALE = 256.0  # what stored float16 gradients are of a mean, times at most this


class LossParams(NamedTuple):
    """`cross_entropy` documents the fields; a softcap of 0 means none."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float = 0.0
    reduction: str = "mean"

    def stored_scale(self, dtype: torch.dtype) -> float:
        """What a mean's gradients are multiplied by at most where they are stored in `dtype`, in the forward pass.

        float16 has numbers from 6e-8 to 65504, and a loss scaler multiplies only afterwards. A mean divides the
        gradient of each logit by the number of targets, which leaves little of it; a sum over many targets may
        overflow. Both are stored as those of the mean times min(number, HALF_SCALE).
        """
        return HALF_SCALE if dtype == torch.float16 and self.reduction != "none" else 1.0


class LinearLossInputs(NamedTuple):
    """The tensors of a linear layer with cross-entropy, as its kernels take them."""

    x: Tensor  # [rows, hidden]
    weight: Tensor  # [classes, hidden]
    bias: Tensor | None  # [classes]
    target: Tensor  # [rows]
