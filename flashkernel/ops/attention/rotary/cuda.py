"""Rotary attention in CUDA C++: attention's forward kernel, with q and k rotated in shared memory."""

from __future__ import annotations

from torch import Tensor

from flashkernel.blocks.mask import Mask
from flashkernel.core.cuda import vectorized
from flashkernel.ops.attention import cuda as plain
from flashkernel.ops.attention.cuda.forward_launch import Rotary, launch_forward
from flashkernel.ops.attention.params import AttentionInputs, AttentionParams, OutputGradients
from flashkernel.ops.attention.rotary.reference import rotated


def forward(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, mask: Mask | None, scale: float
) -> tuple[Tensor, Tensor]:
    """(o, lse): o is (batch, seqlen_q, heads, value_dim) in q's dtype, lse (batch, heads, seqlen_q) in float32."""
    return launch_forward(*_call(q, k, v, mask, scale), Rotary(vectorized(cos), vectorized(sin), interleaved))


def backward(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, cos: Tensor, sin: Tensor,
    interleaved: bool, mask: Mask | None, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv): attention's backward pass of the rotated q and k, then the rotation back, by torch."""
    inputs, params = _call(*rotated(q, k, cos, sin, interleaved), v, mask, scale)
    dq, dk, dv, *_ = plain.backward(OutputGradients(o, lse, do, dlse), inputs, params, False)
    return *rotated(dq, dk, cos, -sin, interleaved), dv


def _call(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, scale: float) -> tuple[AttentionInputs, AttentionParams]:
    return AttentionInputs(q, k, v, None, None, None), AttentionParams(mask, scale, 0.0, None, 0.0, 0)
