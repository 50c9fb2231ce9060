"""The experts of a layer, as backends and kernel modules take them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashkernel.blocks.epilogue import Activation, Gate, activation_piece
from flashkernel.blocks.weight import Weight


@dataclass(frozen=True)
class Experts:
    """The weights of all experts of a layer, and the activation between their products.

    Attributes:
        gate_up: (experts, N, hidden) with any strides, or a stack in a `Weight`; N is 2 * intermediate with a gate.
        down: (experts, hidden, intermediate), likewise.
        gate_up_bias: (experts, N) or None.
        down_bias: (experts, hidden) or None.
        activation: As in `moe_experts`.
        packed: How N holds gate and up: "halves" or "interleaved".
    """

    gate_up: Tensor | Weight
    down: Tensor | Weight
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    activation: str | Activation | Gate = "swiglu"
    packed: str = "halves"

    @property
    def piece(self) -> Activation | Gate:
        """The activation as a piece of an epilogue."""
        found = activation_piece(self.activation)
        assert found is not None
        return found

    @property
    def gate(self) -> str:
        """`packed` if the activation is a gate, else ""."""
        return self.packed if isinstance(self.piece, Gate) else ""

    @property
    def count(self) -> int:
        """The number of experts."""
        return self.gate_up.shape[0]

    @property
    def inner(self) -> int:
        """Columns between the products."""
        return self.gate_up.shape[1] // (2 if self.gate else 1)

    @property
    def layout(self) -> str:
        """The format of the weights, as the choice of a backend sees it."""
        found = [one.layout if isinstance(one, Weight) else "plain" for one in (self.gate_up, self.down)]
        return found[0] if found[0] == found[1] else " and ".join(found)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All tensors that may have a gradient."""
        plain = [one if isinstance(one, Tensor) else None for one in (self.gate_up, self.down)]
        return (*plain, self.gate_up_bias, self.down_bias)


def dense(weight: Tensor | Weight, dtype: torch.dtype) -> Tensor:
    """The weights of all experts as a tensor; a quantized stack is dequantized."""
    return weight.dequantize(dtype) if isinstance(weight, Weight) else weight
