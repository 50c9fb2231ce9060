"""What a module of an MLP's products offers: `MlpProducts`. `products.py` is the only one: it calls `matmul`."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from flashkernel.ops.mlp.params import MainGrads, MlpParams, MlpTensors


class MlpProducts(Protocol):
    """The two products and what lies between them; `MlpTensors` and `MlpParams` document the operands."""

    def forward(
        self, tensors: MlpTensors, params: MlpParams, dtype: torch.dtype, save: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Returns y [rows, outputs] in `dtype`, and with `save` what went into the activation, packed."""

    def backward(
        self, dy: Tensor, tensors: MlpTensors, preactivation: Tensor | None, main_grads: MainGrads,
        params: MlpParams, in_place: bool, wanted: list[bool],
    ) -> list[Tensor | None]:  # fmt: skip
        """Returns the gradients of x, gate (or both), up, down and their biases, as `wanted` asks for them.

        Without a preactivation it is computed again. With `in_place` its memory may be written to. Weights that have
        an entry in `main_grads` have their gradient added there, and None here.
        """


PROTOCOLS = {"mlp": MlpProducts}
