"""What a kernel module of attention offers: `AttentionKernels`, with or without `backward`."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from flashkernel.ops.attention.params import AttentionInputs, AttentionParams, InputGradients, OutputGradients


class AttentionKernels(Protocol):
    """A module such as `triton` or `hopper`. Without `backward`, calls that need gradients go to another backend."""

    def forward(self, inputs: AttentionInputs, params: AttentionParams) -> tuple[Tensor, Tensor]:
        """Returns (o, lse): o (batch, seqlen_q, heads, value_dim) in q's dtype, lse float32 (batch, heads, seqlen_q).

        A query that sees nothing has o = 0 and lse = -inf.
        """

    def backward(
        self, outputs: OutputGradients, inputs: AttentionInputs, params: AttentionParams, want_bias: bool
    ) -> InputGradients:
        """Returns (dq, dk, dv, dbias, dsinks, dslopes) in the dtypes of the inputs.

        A gradient without its input is None, and so is dbias unless `want_bias`.
        """


PROTOCOLS = {"attention": AttentionKernels}
