"""FP8 attention by torch: dequantizes q, k and v and calls the torch backend of attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashkernel.ops.attention import torch as half
from flashkernel.ops.attention.fp8.reference import dequantized


def attention_fp8(
    q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor, *,
    out_dtype: torch.dtype = torch.bfloat16, **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of the dequantized q, k and v, in the dtype of the output."""
    q, k, v = (dequantized(x, factor, out_dtype) for x, factor in ((q, q_scale), (k, k_scale), (v, v_scale)))
    return half.attention(q, k, v, **options)
