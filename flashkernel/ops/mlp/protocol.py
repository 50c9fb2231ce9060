"""What a module of an MLP's products offers: `MlpProducts`. `products.py` is the only one: it calls `matmul`."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from flashkernel.blocks.epilogue import Activation, Gate


class MlpProducts(Protocol):
    """x is [rows, columns]; weights are [out, in], and those of a gate and an up are a list of one, packed, or two."""

    def forward(
        self, x: Tensor, gate_up: list[Tensor], down: Tensor, gate_up_bias: list[Tensor], down_bias: Tensor | None,
        residual: Tensor | None, activation: Activation | Gate, packed: str, dtype: torch.dtype, save: bool,
        backend: str | None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Returns y [rows, outputs] in `dtype`, and with `save` what went into the activation, packed."""

    def backward(
        self, dy: Tensor, x: Tensor, gate_up: list[Tensor], down: Tensor, gate_up_bias: list[Tensor],
        preactivation: Tensor | None, main_grads: list[Tensor | None], activation: Activation | Gate, packed: str,
        in_place: bool, wanted: list[bool], backend: str | None,
    ) -> list[Tensor | None]:  # fmt: skip
        """Returns the gradients of x, gate (or both), up, down and their biases, as `wanted` asks for them.

        Without a preactivation it is computed again. With `in_place` its memory may be written to. Weights that have
        an entry in `main_grads` have their gradient added there, and None here.
        """


PROTOCOLS = {"mlp": MlpProducts}
