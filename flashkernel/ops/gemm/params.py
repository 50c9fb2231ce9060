"""The options of a linear layer: as the composite backends see them, and as the kernel modules do."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flashkernel.blocks.epilogue import Activation, Gate, activation_width
from flashkernel.blocks.weight import Weight
from flashkernel.core.arguments import near

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


class LinearExtras(NamedTuple):
    """What a linear layer computes beyond its products, as kernel modules take it.

    Attributes:
        residual: [rows, outputs] with unit stride along the row, or None.
        norm_weight: [columns of x] or None: x is normalized by its root mean square.
        chain: The text of an epilogue (`Epilogue.parse(chain)`).
        packed: How one weight of a gated chain holds gate and up; kernels get both as views.
        eps: Of the norm.
        offset: Added to norm_weight.
        dtype: The output's.
    """

    residual: Tensor | None
    norm_weight: Tensor | None
    chain: str
    packed: str
    eps: float
    offset: float
    dtype: torch.dtype


def in_one_layout(vectors: list[Tensor], dtypes: Container[torch.dtype] | None = None) -> list[Tensor]:
    """Vectors [n] of one dtype (of `dtypes`) and one stride, as a kernel reads several of them; else float32 copies."""
    vectors = [near(one) for one in vectors]
    readable = dtypes is None or all(one.dtype in dtypes for one in vectors)
    if readable and len({(one.dtype, one.stride(0)) for one in vectors}) <= 1:
        return vectors
    # No contiguous(): of one element it keeps whatever stride there is.
    return [torch.empty(one.shape, dtype=torch.float32, device=one.device).copy_(one) for one in vectors]
