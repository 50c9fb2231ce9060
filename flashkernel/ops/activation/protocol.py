"""What a kernel module of the activations offers: `ActivationKernels`, with or without `backward`."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class ActivationKernels(Protocol):
    """A module such as `triton`. Without `backward`, calls that need gradients go to another backend.

    `layout` is "plain" (no up), "separate", "halves" or "interleaved"; `alpha` and `limit` are those of gpt_oss_glu.
    """

    def forward(self, gate: Tensor, up: Tensor | None, kind: str, layout: str, alpha: float, limit: float) -> Tensor:
        """Returns the activation: gate's shape, or half its last dim where gate holds both."""

    def backward(
        self, dy: Tensor, gate: Tensor, up: Tensor | None, kind: str, layout: str, alpha: float, limit: float
    ) -> tuple[Tensor, Tensor]:
        """Returns (dgate, dup); dup is empty without an up."""


PROTOCOLS = dict.fromkeys(
    ("gelu", "silu", "relu", "squared_relu", "swiglu", "geglu", "reglu", "gpt_oss_glu"), ActivationKernels
)
