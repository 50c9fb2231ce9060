"""The options of a cross-entropy, as every backend sees them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LossParams:
    """`cross_entropy` documents the fields; a softcap of 0 means none."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float = 0.0
    reduction: str = "mean"
