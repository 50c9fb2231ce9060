"""What a module of the experts' products offers: `ExpertProducts`. `products.py` is the only one."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from flashkernel.ops.moe.params import Experts
from flashkernel.ops.moe.routing.protocol import PROTOCOLS as ROUTING
from flashkernel.ops.moe.routing.router import Routing


class ExpertProducts(Protocol):
    """x is [tokens, hidden] with unit stride along its columns; the fields of the routing are contiguous."""

    def forward(
        self, x: Tensor, routing: Routing, experts: Experts, save: bool, backend: str | None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the weighted sums [tokens, hidden] in x's dtype, and with `save` what went into the activation.

        Args:
            x: [tokens, hidden].
            routing: Of these tokens.
            experts: Weights, biases and activation.
            save: Whether a backward pass needs z [rows, N].
            backend: Of the grouped products.
        """

    def backward(
        self, dout: Tensor, x: Tensor, routing: Routing, experts: Experts, z: Tensor | None, in_place: bool,
        wanted: list[bool], backend: str | None,
    ) -> list[Tensor | None]:  # fmt: skip
        """Returns the gradients of x, the routing weights, gate_up, down, gate_up_bias and down_bias, as `wanted`.

        Without z it is computed again. With `in_place` its memory may be written to.
        """


PROTOCOLS = {"moe_experts": ExpertProducts, **ROUTING}
