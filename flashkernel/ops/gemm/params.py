"""The options of a linear layer, as every backend sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashkernel.blocks.epilogue import Activation, Gate, activation_width
from flashkernel.blocks.weight import Weight

Weights = Tensor | Weight | Sequence[Tensor | Weight]
Biases = Tensor | Sequence[Tensor] | None


@dataclass(frozen=True)
class LinearParams:
    """`linear` documents the fields."""

    residual: Tensor | None = None
    norm_weight: Tensor | None = None
    activation: str | Activation | Gate | None = None
    packed: str = "halves"
    splits: Sequence[int] | None = None
    scale: float = 1.0
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    out_dtype: torch.dtype | None = None
    main_grads: Sequence[Tensor] | None = None
    out: Tensor | None = None  # a backend may write there; the public function copies if it does not

    @property
    def gated(self) -> bool:
        """Whether the activation takes gate and up."""
        return activation_width(self.activation) == 2
