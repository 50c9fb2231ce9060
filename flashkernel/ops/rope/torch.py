"""Rotary position embedding by torch's own operators: the CPU default. The rotation is done in float32."""

from __future__ import annotations

import torch
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
    wide = torch.promote_types(q.dtype, torch.float32)
    width = rotary_width("rope", q.shape[-1], cos, rotary_dim, frequencies)
    cos, sin = token_tables(q, cos, sin, positions, frequencies, width, interleaved)
    cos, sin = cos.to(wide), sin.to(wide)

    def turn(x: Tensor) -> Tensor:
        turned = rotate(x[..., :width].to(wide), cos, sin, width, interleaved).to(x.dtype)
        return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), -1)

    return turn(q) if k is None else (turn(q), turn(k))
