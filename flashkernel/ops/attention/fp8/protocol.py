"""What a kernel module of FP8 attention offers: `Fp8Kernels`. It is forward-only."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from flashkernel.ops.attention.fp8.params import Fp8Inputs
from flashkernel.ops.attention.params import AttentionParams


class Fp8Kernels(Protocol):
    """A module such as `triton` or `hopper`."""

    def forward(self, inputs: Fp8Inputs, params: AttentionParams, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns (o, lse): o (batch, seqlen_q, heads, value_dim) in `out_dtype`, lse float32 (batch, heads, seqlen_q).

        Of `params`, mask, scale and softcap are set.
        """


PROTOCOLS = {"attention_fp8": Fp8Kernels}
