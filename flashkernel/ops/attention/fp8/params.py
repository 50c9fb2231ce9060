"""What the kernel modules of FP8 attention take."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Fp8Inputs(NamedTuple):
    """The tensors of a call.

    q, k and v are float8_e4m3fn; what they are multiplied by is float32 (batch, heads) or (batch, heads, blocks of 128
    positions).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_scale: Tensor
    k_scale: Tensor
    v_scale: Tensor
    sinks: Tensor | None
