"""Rotary position embedding in plain torch: the ground truth, in whatever precision it is given."""

from __future__ import annotations

import torch
from torch import Tensor

from flashkernel.ops.rope.frequencies import Frequencies
from flashkernel.ops.rope.tables import rotary_width, token_tables


def rope(
    q: Tensor,
    k: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    positions: Tensor | None = None,
    *,
    frequencies: Frequencies | None = None,
    rotary_dim: int | None = None,
    interleaved: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Each pair (a, b) of a head's first dims becomes (a cos - b sin, b cos + a sin)."""
    width = rotary_width(q.shape[-1], cos, rotary_dim, frequencies)
    cos, sin = token_tables(q, cos, sin, positions, frequencies, width, interleaved)
    rotated = [rotate(x, cos.to(x.dtype), sin.to(x.dtype), width, interleaved) for x in (q, k) if x is not None]
    return rotated[0] if k is None else (rotated[0], rotated[1])


def rotate(x: Tensor, cos: Tensor, sin: Tensor, width: int, interleaved: bool) -> Tensor:
    """x [batch, seq, heads, head_dim], its first `width` dims turned by cos and sin [batch or 1, seq, 1, width / 2]."""
    turning, rest = x[..., :width], x[..., width:]
    if interleaved:
        a, b = turning[..., ::2], turning[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = turning[..., : width // 2], turning[..., width // 2 :]
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return torch.cat((turned, rest), -1)
