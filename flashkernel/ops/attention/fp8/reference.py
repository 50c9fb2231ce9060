"""FP8 attention in plain torch: dequantization, and the reference implementation."""

from __future__ import annotations

import torch
from torch import Tensor

from flashkernel.blocks.fp8 import FP8, SCALE_BLOCK, expand_scales
from flashkernel.blocks.mask import Mask
from flashkernel.ops.attention import reference


def dequantized(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns x (batch, seqlen, heads, head_dim) times its scales, (batch, heads) or (batch, heads, blocks), in
    `dtype`."""
    factor = scale.to(dtype)[..., None]  # [B, H, 1], or [B, H, blocks, 1]
    if scale.ndim == 3:
        return x.to(dtype) * expand_scales(factor, (SCALE_BLOCK, 1), (x.shape[1], 1)).transpose(1, 2)
    return x.to(dtype) * factor[:, None]


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
    """Attention of the dequantized q, k and v: in float32, or in q's dtype if that is wider than FP8."""
    quantized = q.dtype == FP8
    wide = torch.float32 if quantized else q.dtype
    found = reference.attention(
        dequantized(q, q_scale, wide), dequantized(k, k_scale, wide), dequantized(v, v_scale, wide), sinks=sinks,
        mask=mask, scale=scale, softcap=softcap, return_lse=True,
    )  # fmt: skip
    out, lse = found[0].to(out_dtype) if quantized else found[0], found[1]
    return (out, lse) if return_lse else out
