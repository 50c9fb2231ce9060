"""The tensors and options of an MLP: as the composite backends see them, and as the module of its products does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flashkernel.blocks.epilogue import Activation, Epilogue, Gate


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
    """The tensors of an MLP: plain weights [out, in]. `MlpProducts` takes x and the residual by rows.

    Attributes:
        x: [rows, columns] with unit stride along the columns.
        gate_up: The weight before the activation: of gate and up, packed, or of the gate alone.
        up: That of up where it is separate, or None.
        down: [outputs, intermediate].
        gate_up_bias: That of `gate_up`, or None.
        up_bias: That of `up`, or None.
        down_bias: [outputs] or None.
        residual: [rows, outputs] or None; of the forward pass alone.
    """

    x: Tensor
    gate_up: Tensor
    up: Tensor | None
    down: Tensor
    gate_up_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    residual: Tensor | None = None

    @property
    def wide(self) -> list[Tensor]:
        """The weights before the activation."""
        return [self.gate_up] if self.up is None else [self.gate_up, self.up]

    @property
    def wide_biases(self) -> list[Tensor]:
        """Their biases; none, or one for each."""
        return [bias for bias in (self.gate_up_bias, self.up_bias) if bias is not None]


class MainGrads(NamedTuple):
    """Buffers that the gradients of weights are added to, or None."""

    main_gate_up: Tensor | None = None
    main_up: Tensor | None = None
    main_down: Tensor | None = None


class MlpParams(NamedTuple):
    """How the products of an MLP are computed.

    Attributes:
        activation: The text of the activation or gate between them, a piece of an epilogue.
        packed: How one weight, and what goes into a gate, hold gate and up: "halves" or "interleaved".
        backend: That of products with an activation, its gradient or a residual; None lets `matmul` choose.
    """

    activation: str
    packed: str
    backend: str | None

    @property
    def piece(self) -> Activation | Gate:
        """The activation or gate."""
        found = Epilogue.parse(self.activation).pieces[0]
        assert isinstance(found, (Activation, Gate))
        return found
