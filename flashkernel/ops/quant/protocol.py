"""What a kernel module of this package offers: `QuantizeKernels`."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class QuantizeKernels(Protocol):
    """A module such as `triton`. Tensors are [rows, width] with unit stride along the row, unless said otherwise.

    `code` is "e4m3" or "int8"; codes are uint8 or int8. `columns` is the width of a group, and `width` itself for one
    scale for each row.
    """

    def quantize(
        self, x: Tensor, scale: Tensor | None, code: str, columns: int, symmetric: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (codes [rows, width], float32 scales [rows, groups], int8 zeros of that shape or empty).

        A given scale is float32 and contiguous, with one element or one for each group; scales are then empty.
        """

    def dequantize(
        self, codes: Tensor, scales: Tensor, zeros: Tensor | None, code: str, columns: int, dtype: torch.dtype
    ) -> Tensor:
        """Returns (codes - zeros) * scales, [rows, width] in `dtype`; there is one scale, or one for each group."""

    def rms_norm_quantize(
        self, x: Tensor, weight: Tensor | None, residual: Tensor | None, code: str, columns: int, eps: float,
        offset: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Returns (codes, scales, x + residual in x's dtype or empty)."""

    def glu_quantize(
        self, gate: Tensor, up: Tensor | None, kind: str, layout: str, code: str, columns: int
    ) -> tuple[Tensor, Tensor]:
        """Returns (codes, scales) of activation(gate) * up; layout is "separate", "halves" or "interleaved"."""


PROTOCOLS = dict.fromkeys(("quantize", "dequantize", "rms_norm_quantize", "glu_quantize"), QuantizeKernels)
