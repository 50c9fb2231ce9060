"""What a kernel module of attention over packed sequences offers: `VarlenKernels`, with or without `backward`."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from flashkernel.ops.attention.varlen.params import HeadShape, VarlenInputs, VarlenParams


class VarlenKernels(Protocol):
    """A module such as `hopper.varlen`. Without `backward`, calls that need gradients go to another backend."""

    def schedule(
        self, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, tokens: tuple[int, int], heads: HeadShape,
        dtype: torch.dtype, params: VarlenParams, gradients: bool,
    ) -> Tensor:  # fmt: skip
        """Returns what the kernels need to know of the lengths, made on the device: an int32 tensor of at most
        `schedule_size` elements that all calls with these arguments share, for both directions with `gradients`."""

    def forward(self, inputs: VarlenInputs, schedule: Tensor, params: VarlenParams) -> tuple[Tensor, Tensor]:
        """Returns (o, lse): o (tokens_q, heads, value_dim) in q's dtype, lse float32 (heads, tokens_q).

        A query that sees nothing, and one behind the last sequence, has o = 0 and lse = -inf.
        """

    def backward(
        self, do: Tensor, dlse: Tensor | None, inputs: VarlenInputs, o: Tensor, lse: Tensor, schedule: Tensor,
        params: VarlenParams,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
        """Returns (dq, dk, dv, dsinks) in the dtypes of the inputs; without sinks, dsinks is None."""


PROTOCOLS = {"attention_varlen": VarlenKernels}
