"""What a kernel module of rope offers: `RopeKernels`. The gradient of a rotation is the inverse rotation."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class RopeKernels(Protocol):
    """A module such as `triton`. The angles are tables cos and sin, or rates (frequencies); see `flashkernel.rope`."""

    def forward(
        self, q: Tensor, k: Tensor | None, cos: Tensor | None, sin: Tensor | None, rates: Tensor | None,
        positions: Tensor | None, scaling: float, rotary: int, interleaved: bool, inverse: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Returns the rotated (q, k), contiguous; k is empty without one. `inverse` rotates back."""

    def forward_in_place(
        self, q: Tensor, k: Tensor | None, cos: Tensor | None, sin: Tensor | None, rates: Tensor | None,
        positions: Tensor | None, scaling: float, rotary: int, interleaved: bool,
    ) -> None:  # fmt: skip
        """Overwrites q and k."""


PROTOCOLS = {"rope": RopeKernels}
