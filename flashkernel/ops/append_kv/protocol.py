"""What a kernel module of append_kv offers: `AppendKernels`. It is forward-only."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from flashkernel.blocks.rope import Rotation
from flashkernel.ops.append_kv.params import NewTokens, Pages


class AppendKernels(Protocol):
    """A module such as `triton`."""

    def forward(self, new: NewTokens, pages: Pages, slots: Tensor, rotation: Rotation) -> Tensor:
        """Writes the pages and their scales; returns the rotated q, or an empty tensor without one."""


PROTOCOLS = {"append_kv": AppendKernels}
