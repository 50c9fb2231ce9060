"""What a kernel module of attention offers: `AttentionKernels`, with or without `backward`."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from flashkernel.ops.attention.params import AttentionInputs, AttentionParams


class AttentionKernels(Protocol):
    """A module such as `triton` or `hopper`. Without `backward`, calls that need gradients go to another backend."""

    def forward(self, inputs: AttentionInputs, params: AttentionParams) -> tuple[Tensor, Tensor]:
        """Returns (o, lse): o (batch, seqlen_q, heads, value_dim) in q's dtype, lse float32 (batch, heads, seqlen_q).

        A query that sees nothing has o = 0 and lse = -inf.
        """

    def backward(
        self, do: Tensor, dlse: Tensor | None, inputs: AttentionInputs, o: Tensor, lse: Tensor,
        params: AttentionParams, want_bias: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
        """Returns (dq, dk, dv, dbias, dsinks, dslopes) in the dtypes of the inputs.

        `do` has o's shape and unit stride along its last dim, `dlse` lse's or is None; o and lse are what `forward`
        returned. A gradient without its input is None, and so is dbias unless `want_bias`.
        """


PROTOCOLS = {"attention": AttentionKernels}
