"""FP8 attention by torch: dequantised, and then the room's torch backend."""

from __future__ import annotations

import torch
from torch import Tensor

from flashkernel.blocks.mask import Mask
from flashkernel.ops.attention import torch as half
from flashkernel.ops.attention.fp8.reference import dequantised


def attention_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    *,
    mask: Mask | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    return_lse: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computed in the dtype of the output."""
    q, k, v = (dequantised(x, factor, out_dtype) for x, factor in ((q, q_scale), (k, k_scale), (v, v_scale)))
    return half.attention(q, k, v, sinks=sinks, mask=mask, scale=scale, softcap=softcap, return_lse=return_lse)
