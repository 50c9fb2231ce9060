"""The options of a grouped product: as the composite backends see them, and as the kernel modules do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flashkernel.blocks.epilogue import Activation, Epilogue, Gate


@dataclass(frozen=True)
class GroupedOptions:
    """`grouped_matmul` documents the fields."""

    gather: Tensor | None = None
    scatter: Tensor | None = None
    row_weights: Tensor | None = None
    bias: Tensor | None = None
    activation: str | Activation | Gate | None = None
    packed: str = "halves"
    x_scale: Tensor | None = None
    weight_scale: Tensor | None = None
    out_rows: int | None = None
    out_dtype: torch.dtype | None = None
    return_preactivation: bool = False


class GroupedStrides(NamedTuple):
    """Strides of the bias [groups, N] and of the scales in `GroupedTensors`; 0 for what is the same for all."""

    bias_group: int
    bias_column: int
    x_scale: int
    weight_scale_group: int
    weight_scale_column: int


class GroupedTensors(NamedTuple):
    """The tensors of a grouped product beside x, the weights and the offsets, as kernel modules take them.

    Attributes:
        gather: int32 [rows], contiguous, or None: row r of x is read.
        scatter: int32 [rows], contiguous, all different, or None: row r of y is written.
        row_weights: float32 [rows], contiguous, or None.
        bias: [groups, N] in any float dtype, any strides, or None.
        x_scale: float32 [1] or [tokens], contiguous, for 8-bit operands; it multiplies the sum ahead of the bias.
        weight_scale: float32 [groups, 1] or [groups, N], any strides; given if x_scale is.
        preactivation: None, or an empty contiguous tensor [rows, N], to which the kernel writes z, rounded to its
            dtype. Rows after the last group become zero.
    """

    gather: Tensor | None = None
    scatter: Tensor | None = None
    row_weights: Tensor | None = None
    bias: Tensor | None = None
    x_scale: Tensor | None = None
    weight_scale: Tensor | None = None
    preactivation: Tensor | None = None

    def num_rows(self, x: Tensor) -> int:
        """Rows of the product: those gathered or scattered, or else x's."""
        index = self.scatter if self.gather is None else self.gather
        return (x if index is None else index).shape[0]

    @property
    def bias_strides(self) -> tuple[int, ...]:
        return (0, 0) if self.bias is None else self.bias.stride()

    @property
    def strides(self) -> GroupedStrides:
        bias_group, bias_column = self.bias_strides
        x_scale, weight_scale = self.scale_strides
        return GroupedStrides(bias_group, bias_column, x_scale, *weight_scale)

    @property
    def scale_strides(self) -> tuple[int, tuple[int, int]]:
        """Strides of x's scales [rows or 1] and of the weights' [groups, N or 1]; 0 for a dim that is broadcast."""
        if self.x_scale is None or self.weight_scale is None:
            return 0, (0, 0)
        columns = 0 if self.weight_scale.shape[1] == 1 else self.weight_scale.stride(1)
        return 0 if self.x_scale.shape[0] == 1 else self.x_scale.stride(0), (self.weight_scale.stride(0), columns)


class GroupedParams(NamedTuple):
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

    def new_output(self, x: Tensor, weights: Tensor, tensors: GroupedTensors) -> tuple[Tensor, bool]:
        """Returns (y [out_rows, columns], whether a kernel must run).

        y is zero where scatter leaves rows out. Without elements or groups there is nothing to run: y is final.
        """
        rows = tensors.num_rows(x)
        whole = tensors.scatter is None or rows == self.out_rows  # as many different indices as rows name every row
        size = (self.out_rows, self.out_columns(weights.shape[2]))
        y = (torch.empty if whole else torch.zeros)(size, dtype=self.out_dtype, device=x.device)
        if y.numel() == 0 or rows == 0:
            return y, False
        if weights.shape[0] > 0:
            return y, True
        if tensors.preactivation is not None:
            tensors.preactivation.zero_()
        return y.zero_(), False
