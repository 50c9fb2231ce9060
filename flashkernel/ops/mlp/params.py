"""The options of an MLP, as the composite backends see them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashkernel.blocks.epilogue import Activation, Gate


@dataclass(frozen=True)
class MlpParams:
    """`mlp` documents the fields."""

    activation: str | Activation | Gate = "swiglu"
    packed: str = "halves"
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    out_dtype: torch.dtype | None = None
    recompute: bool = False
