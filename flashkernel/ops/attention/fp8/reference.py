"""FP8 attention in plain torch: dequantization, and the reference implementation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks.fp8 import FP8, SCALE_BLOCK, expand_scales
from flashkernel.ops.attention import reference


def dequantized(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns x (batch, seqlen, heads, head_dim) times its scales, (batch, heads) or (batch, heads, blocks), in
    `dtype`."""
    factor = scale.to(dtype)[..., None]  # [B, H, 1], or [B, H, blocks, 1]
    if scale.ndim == 3:
        return x.to(dtype) * expand_scales(factor, (SCALE_BLOCK, 1), (x.shape[1], 1)).transpose(1, 2)
    return x.to(dtype) * factor[:, None]


def attention_fp8(
    q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor, *,
    out_dtype: torch.dtype = torch.bfloat16, return_lse: bool = False, **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of the dequantized q, k and v: in float32, or in q's dtype if that is wider than FP8."""
    quantized = q.dtype == FP8
    wide = torch.float32 if quantized else q.dtype
    q, k, v = (dequantized(x, factor, wide) for x, factor in ((q, q_scale), (k, k_scale), (v, v_scale)))
    found = reference.attention(q, k, v, return_lse=True, **options)
    out, lse = found[0].to(out_dtype) if quantized else found[0], found[1]
    return (out, lse) if return_lse else out
