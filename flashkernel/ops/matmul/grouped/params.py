"""The options of a grouped product, as every kernel module sees them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashkernel.blocks.epilogue import Epilogue


@dataclass(frozen=True)
class GroupedParams:
    """What a grouped product computes beyond its operands.

    Attributes:
        out_dtype: The output's dtype. Sums are in float32.
        out_rows: Rows of the output. Where there is a scatter index, rows that it does not name are zero.
        tf32: As in `MatmulParams`.
        activation: The text of an epilogue's piece (`Activation` or `Gate`), or "". It is applied to the float32
            product with its bias; row weights multiply its result.
        packed: Where a gated product has gate and up: "halves" or "interleaved" columns (`blocks.gate_up`).
    """

    out_dtype: torch.dtype
    out_rows: int
    tf32: bool = False
    activation: str = ""
    packed: str = "halves"

    @property
    def gate(self) -> str:
        """`packed` if the activation is a gate, else ""."""
        return self.packed if Epilogue.parse(self.activation).gated else ""

    def out_columns(self, columns: int) -> int:
        """Columns of the output of a product with `columns` columns."""
        return columns // 2 if self.gate else columns
