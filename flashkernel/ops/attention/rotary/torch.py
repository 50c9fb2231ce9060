"""Rotary attention by torch: rotates q and k, then calls the torch backend of attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashkernel.ops.attention import torch as plain
from flashkernel.ops.attention.rotary.reference import rotated


def rotary_attention(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of the rotated q and k; differentiable in q, k and v."""
    return plain.attention(*rotated(q, k, cos, sin, interleaved), v, **options)
