"""Rotary position embedding in plain torch: the ground truth, in whatever precision it is given."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashkernel.blocks.rope import RotaryOptions, rotate


def rope(q: Tensor, k: Tensor | None = None, *angles: Any, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
    """Each pair (a, b) of a head's first dims becomes (a cos - b sin, b cos + a sin); the rest are RotaryOptions."""
    given = RotaryOptions(*angles, **options)
    cos, sin, width = given.token_tables("rope", q)
    rotated = [rotate(x, cos.to(x.dtype), sin.to(x.dtype), width, given.interleaved) for x in (q, k) if x is not None]
    return rotated[0] if k is None else (rotated[0], rotated[1])
