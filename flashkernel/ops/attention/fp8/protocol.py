"""What a kernel module of FP8 attention offers: `Fp8Kernels`. It is forward-only."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from flashkernel.blocks.mask import Mask


class Fp8Kernels(Protocol):
    """A module such as `triton` or `hopper`."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor,
        sinks: Tensor | None, mask: Mask | None, scale: float, softcap: float, out_dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Returns (o, lse): o (batch, seqlen_q, heads, value_dim) in `out_dtype`, lse float32 (batch, heads, seqlen_q).

        q, k and v are float8_e4m3fn, their scales float32 (batch, heads) or (batch, heads, blocks of 128 positions).
        """


PROTOCOLS = {"attention_fp8": Fp8Kernels}
