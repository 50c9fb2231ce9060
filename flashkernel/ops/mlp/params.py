"""The tensors and options of an MLP: as the composite backends see them, and as the module of its products does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flashkernel.blocks.epilogue import Activation, Gate


@dataclass(frozen=True)
class MlpOptions:
    """`mlp` documents the fields."""

    gate_up_bias: Tensor | Sequence[Tensor] | None = None
    down_bias: Tensor | None = None
    residual: Tensor | None = None
    norm_weight: Tensor | None = None
    activation: str | Activation | Gate = "swiglu"
    packed: str = "halves"
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    out_dtype: torch.dtype | None = None
    recompute: bool = False


class MlpTensors(NamedTuple):
    """The tensors of an MLP as `MlpProducts` takes them: plain weights [out, in], x and the residual by rows.

    Attributes:
        x: [rows, columns] with unit stride along the columns.
        gate_up: One weight, in which a gate has both packed, or those of gate and up.
        down: [outputs, intermediate].
        gate_up_bias: One for each of `gate_up`, or none.
        down_bias: [outputs] or None.
        residual: [rows, outputs] or None; of the forward pass alone.
    """

    x: Tensor
    gate_up: list[Tensor]
    down: Tensor
    gate_up_bias: list[Tensor]
    down_bias: Tensor | None = None
    residual: Tensor | None = None


@dataclass(frozen=True)
class MlpParams:
    """How the products of an MLP are computed.

    Attributes:
        activation: The activation or gate between them.
        packed: How one weight, and what goes into a gate, hold gate and up: "halves" or "interleaved".
        backend: That of products with an activation, its gradient or a residual; None lets `matmul` choose.
    """

    activation: Activation | Gate
    packed: str
    backend: str | None
