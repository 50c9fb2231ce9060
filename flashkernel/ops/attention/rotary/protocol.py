"""What a kernel module of rotary attention offers: `RotaryKernels`, with or without `backward`."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from flashkernel.blocks.mask import Mask


class RotaryKernels(Protocol):
    """A module such as `cuda`."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, mask: Mask | None,
        scale: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Returns (o, lse): o (batch, seqlen_q, heads, value_dim) in q's dtype, lse float32 (batch, heads, seqlen_q).

        cos and sin are float32 [positions, rotary_dim / 2], contiguous, with at least seqlen_k positions.
        """

    def backward(
        self, do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, cos: Tensor,
        sin: Tensor, interleaved: bool, mask: Mask | None, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Returns (dq, dk, dv) in the dtypes of q, k and v; o and lse are what `forward` returned."""


PROTOCOLS = {"rotary_attention": RotaryKernels}
