"""The options of a cross-entropy, as every backend sees them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class LossParams(NamedTuple):
    """`cross_entropy` documents the fields; a softcap of 0 means none."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float = 0.0
    reduction: str = "mean"


class LinearLossInputs(NamedTuple):
    """The tensors of a linear layer with cross-entropy, as its kernels take them."""

    x: Tensor  # [rows, hidden]
    weight: Tensor  # [classes, hidden]
    bias: Tensor | None  # [classes]
    target: Tensor  # [rows]
