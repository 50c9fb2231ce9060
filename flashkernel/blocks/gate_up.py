"""Gate and up of a gated activation in one tensor: where each of them lies."""

from __future__ import annotations

import torch
from torch import Tensor

PACKINGS = ("halves", "interleaved")


def split_gate_up(packed: Tensor, packing: str, dim: int = -1) -> tuple[Tensor, Tensor]:
    """Returns (gate, up) as views along `dim`: its halves, or its even and odd positions."""
    size = packed.shape[dim]
    if packing == "interleaved":
        split = packed.unflatten(dim, (size // 2, 2))
        after = dim if dim < 0 else dim + 1
        return split.select(after, 0), split.select(after, 1)
    return packed.narrow(dim, 0, size // 2), packed.narrow(dim, size // 2, size // 2)


def join_gate_up(gate: Tensor, up: Tensor, packing: str) -> Tensor:
    """Packs gate and up along the last dim; the inverse of `split_gate_up`."""
    return torch.stack((gate, up), -1).flatten(-2) if packing == "interleaved" else torch.cat((gate, up), -1)
