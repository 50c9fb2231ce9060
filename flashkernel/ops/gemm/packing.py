"""A gate and an up weight packed into one tensor: where each of them lies."""

from __future__ import annotations

import torch
from torch import Tensor

PACKINGS = ("halves", "interleaved")


def pair_of(packed: Tensor, how: str, dim: int) -> tuple[Tensor, Tensor]:
    """(gate, up) as views along `dim`: its halves, or its even and odd places."""
    size = packed.shape[dim]
    if how == "interleaved":
        split = packed.unflatten(dim, (size // 2, 2))
        after = dim if dim < 0 else dim + 1
        return split.select(after, 0), split.select(after, 1)
    return packed.narrow(dim, 0, size // 2), packed.narrow(dim, size // 2, size // 2)


def packed_of(gate: Tensor, up: Tensor, how: str) -> Tensor:
    """The reverse, along the last dim."""
    return torch.stack((gate, up), -1).flatten(-2) if how == "interleaved" else torch.cat((gate, up), -1)
