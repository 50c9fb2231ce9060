"""Attention in CUDA C++, from Turing (sm_75) up."""

from __future__ import annotations

from torch import Tensor

from flashkernel.ops.attention.cuda.backward_launch import backward
from flashkernel.ops.attention.cuda.forward_launch import launch_forward
from flashkernel.ops.attention.params import AttentionInputs, AttentionParams

__all__ = ["backward", "forward"]


def forward(inputs: AttentionInputs, params: AttentionParams) -> tuple[Tensor, Tensor]:
    """(o, lse): o is (batch, seqlen_q, heads, value_dim) in q's dtype, lse (batch, heads, seqlen_q) in float32."""
    return launch_forward(inputs, params, None)
