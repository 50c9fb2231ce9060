"""What rotary attention is timed against."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashkernel.ops.attention.rotary.reference import rotated


def eager(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> Tensor:
    """Rotation by torch's operators, then scaled_dot_product_attention."""
    q, k = rotated(q, k, cos, sin, options.get("interleaved", False))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=options.get("causal", False), enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2)
