"""What a kernel module of rope offers: `RopeKernels`. The gradient of a rotation is the inverse rotation."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from flashkernel.blocks.rope import Rotation


class RopeKernels(Protocol):
    """A module such as `triton`. `Rotation` documents the angles."""

    def forward(self, q: Tensor, k: Tensor | None, rotation: Rotation, inverse: bool) -> tuple[Tensor, Tensor]:
        """Returns the rotated (q, k), contiguous; k is empty without one. `inverse` rotates back."""

    def forward_in_place(self, q: Tensor, k: Tensor | None, rotation: Rotation) -> None:
        """Overwrites q and k."""


PROTOCOLS = {"rope": RopeKernels}
