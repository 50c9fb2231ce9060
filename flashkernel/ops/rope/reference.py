"""Rotary position embedding in plain torch: the ground truth, in whatever precision it is given."""

from __future__ import annotations

from torch import Tensor

from flashkernel.blocks.frequencies import Frequencies
from flashkernel.blocks.rope import rotary_width, rotate, token_tables


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
    width = rotary_width("rope", q.shape[-1], cos, rotary_dim, frequencies)
    cos, sin = token_tables(q, cos, sin, positions, frequencies, width, interleaved)
    rotated = [rotate(x, cos.to(x.dtype), sin.to(x.dtype), width, interleaved) for x in (q, k) if x is not None]
    return rotated[0] if k is None else (rotated[0], rotated[1])
