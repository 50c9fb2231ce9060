"""Rotary position embedding by torch's own operators: the CPU default. The rotation is done in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks.rope import RotaryOptions, rotate


def rope(q: Tensor, k: Tensor | None = None, *angles: Any, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
    given = RotaryOptions(*angles, **options)
    wide = torch.promote_types(q.dtype, torch.float32)
    cos, sin, width = given.token_tables("rope", q)
    cos, sin = cos.to(wide), sin.to(wide)

    def rotated(x: Tensor) -> Tensor:
        rotary = rotate(x[..., :width].to(wide), cos, sin, width, given.interleaved).to(x.dtype)
        return rotary if width == x.shape[-1] else torch.cat((rotary, x[..., width:]), -1)

    return rotated(q) if k is None else (rotated(q), rotated(k))
