"""What formats with scales share: the checks of their tensors, slices of rows and concatenation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flashkernel.blocks.fp8 import group_count
from flashkernel.blocks.weight import GRANULARITIES, Layout, Weight


class GroupedFormat(ABC):
    """A format whose elements share scales, and zeros if it has them, in groups of group_shape (rows, columns).

    scales and zeros have the shape (out / rows, in / columns), rounded up, with the stack's dim before.
    """

    name: str
    data_dtype: torch.dtype
    scale_dtype = torch.float32
    activation_dtypes: tuple[torch.dtype, ...] = ()  # what x may be rounded to
    has_zeros = False
    zero_dtype: torch.dtype | None = None  # None: data_dtype
    packing = 1  # elements in an element of data

    def shape(self, data: Tensor) -> torch.Size:
        return data.shape if self.packing == 1 else torch.Size((*data.shape[:-1], data.shape[-1] * self.packing))

    def error(self, weight: Weight) -> str | None:
        data, scales, group = weight.data, weight.scales, weight.group_shape
        if data.dtype != self.data_dtype or data.ndim < 2:
            columns = "in" if self.packing == 1 else f"in / {self.packing}"
            expected = str(self.data_dtype).removeprefix("torch.")
            return (
                f"{self.name} data is {data.dtype} {tuple(data.shape)}; it must be a {expected} matrix (out, {columns})"
            )
        if any(size != -1 and size < 1 for size in group):
            return f"group_shape is {group}; sizes are positive, or -1 for all"
        reason = self.group_error(group, self.shape(data)[-1])
        if reason is not None:
            return reason
        wanted = self.scale_shape(self.shape(data), group)
        if scales is None or scales.dtype != self.scale_dtype or tuple(scales.shape) != wanted:
            given = "missing" if scales is None else f"{scales.dtype} {tuple(scales.shape)}"
            kind = str(self.scale_dtype).removeprefix("torch.")
            return (
                f"the scales are {given}; data {tuple(data.shape)} in groups of {group} has {kind} scales {wanted}; "
                "Weight.pack takes those of checkpoints"
            )
        if scales.device != data.device:
            return f"the data is on {data.device} and the scales are on {scales.device}; move one of them"
        return self._zeros_error(weight) or self._activations_error(weight)

    def _zeros_error(self, weight: Weight) -> str | None:
        zeros = weight.zeros
        if zeros is None:
            return None
        if not self.has_zeros:
            return f"{self.name} has no zeros"
        assert weight.scales is not None
        dtype = self.zero_dtype or self.data_dtype
        if zeros.dtype != dtype or zeros.shape != weight.scales.shape or zeros.device != weight.device:
            return (
                f"the zeros are {zeros.dtype} {tuple(zeros.shape)} on {zeros.device}; they must be {dtype} "
                f"of the scales' shape {tuple(weight.scales.shape)} on {weight.device}"
            )
        return None

    def _activations_error(self, weight: Weight) -> str | None:
        if weight.activation_dtype is None or weight.activation_dtype in self.activation_dtypes:
            return None
        allowed = "".join(f" or in {dtype}" for dtype in self.activation_dtypes)
        return f"activation_dtype is {weight.activation_dtype}; {self.name} weights take x as it is{allowed}"

    def group_error(self, group: tuple[int, int], columns: int) -> str | None:
        """Why the format has no such groups in a matrix of so many columns; None if it has."""
        return None

    def check_group(self, group: tuple[int, int], columns: int) -> None:
        """ValueError if the format has no such groups."""
        reason = self.group_error(group, columns)
        if reason is not None:
            raise ValueError(f"Weight.quantize: {reason}")

    def check_symmetric(self, symmetric: bool) -> None:
        """ValueError if zero points are asked for; of formats that have none."""
        if not symmetric:
            raise ValueError(f"Weight.quantize: {self.name} has no zero points; leave symmetric=False away")

    def default_group(self, columns: int) -> tuple[int, int]:
        return GRANULARITIES["row"]

    def scale_shape(self, shape: Sequence[int], group: tuple[int, int]) -> tuple[int, ...]:
        """The shape of the scales of a matrix of `shape`."""
        return (*shape[:-2], *[group_count(size, each) for size, each in zip(shape[-2:], group)])

    @abstractmethod
    def dequantize(self, weight: Weight, dtype: torch.dtype) -> Tensor: ...

    @abstractmethod
    def quantize(self, tensor: Tensor, group_shape: tuple[int, int], symmetric: bool) -> Weight: ...

    def pack(self, data: Tensor, scales: Tensor | None, zeros: Tensor | None) -> Weight:
        if scales is None:
            raise ValueError(f"Weight.pack: {self.name} data comes with scales; none were given")
        if not scales.is_floating_point():  # exponents would be taken for factors
            raise ValueError(f"Weight.pack: scales of {self.name} data are floats; they are {scales.dtype}")
        group = self.stored_group(self.shape(data), tuple(scales.shape))
        wanted = self.scale_shape(self.shape(data), group)
        zeros = None if zeros is None else zeros.to(self.data_dtype).reshape(wanted)
        return Weight(data, scales.to(self.scale_dtype).reshape(wanted), zeros, self.name, group)

    def stored_group(self, shape: Sequence[int], scales: tuple[int, ...]) -> tuple[int, int]:
        """The groups of a matrix of `shape` whose scales have that shape, as checkpoints store them."""
        rows, columns, stack = shape[-2], shape[-1], tuple(shape[:-2])
        if scales == stack or (not stack and scales == (1,)) or scales == (*stack, 1, 1):
            return GRANULARITIES["tensor"]
        if scales in ((*stack, rows), (*stack, rows, 1)):
            return GRANULARITIES["row"]
        if len(scales) == len(shape) and scales[:-1] == (*stack, rows) and scales[-1] and columns % scales[-1] == 0:
            return 1, columns // scales[-1]
        raise ValueError(
            f"Weight.pack: a {self.name} matrix {tuple(shape)} has one scale, one for each row, or one for each group "
            f"of a row that divides it; scales {scales} are none of these"
        )

    def rows(self, weight: Weight, rows: slice) -> Weight:
        if weight.group_shape[0] == -1:
            return replace(weight, data=weight.data[..., rows, :])
        each = _scale_for_each_row(weight)  # rows of a slice lie anywhere in a group
        zeros = None if each.zeros is None else each.zeros[..., rows, :]
        return replace(each, data=each.data[..., rows, :], scales=scales_of(each)[..., rows, :], zeros=zeros)

    def concatenate(self, weights: Sequence[Weight]) -> Weight:
        each, columns = weights[0].group_shape
        if any(weight.group_shape[1] != columns for weight in weights):
            raise ValueError(f"Weight.concatenate: {', '.join(map(repr, weights))} have scales of different columns")
        whole = each > 1 and all(
            weight.group_shape[0] == each and (weight is weights[-1] or weight.data.shape[-2] % each == 0)
            for weight in weights
        )
        parts = list(weights) if whole else [_scale_for_each_row(weight) for weight in weights]
        data, scales = torch.cat([part.data for part in parts], -2), torch.cat([scales_of(part) for part in parts], -2)
        zeros = [part.zeros for part in parts if part.zeros is not None]
        return replace(
            weights[0],
            data=data,
            scales=scales,
            zeros=torch.cat(zeros, -2) if zeros else None,
            group_shape=parts[0].group_shape,
        )

    def declines(self, backend: str, layout: Layout) -> str | None:
        if backend != "triton":
            return f"its kernels read float weights, not {self.name}"
        if layout.activation_dtype is not None:
            return "its kernels take x as it is; this weight asks for x in 8 bits"
        if layout.group_shape[0] not in (1, -1):
            rows, columns = layout.group_shape
            return f"its kernels read scales of rows, of groups in a row or of the tensor, not of {rows}x{columns}"
        return None


class FixedGroupsFormat(GroupedFormat):
    """A format whose groups are always so many columns of a row."""

    columns: int  # of a group
    multiple: int  # of columns in a matrix

    def group_error(self, group: tuple[int, int], columns: int) -> str | None:
        if group != (1, self.columns):
            return (
                f"{self.name} has a scale for each {self.columns} columns of a row (granularity 1x{self.columns}), "
                f"not for {group[0]}x{group[1]}"
            )
        if columns % self.multiple:
            return (
                f"{self.name} has blocks of {self.multiple} columns, which do not divide {columns}; add columns of "
                "zeros, or use int8"
            )
        return None

    def default_group(self, columns: int) -> tuple[int, int]:
        return 1, self.columns


def scales_of(weight: Weight) -> Tensor:
    """The scales, which every format but "plain" has."""
    assert weight.scales is not None
    return weight.scales


def _scale_for_each_row(weight: Weight) -> Weight:
    rows = weight.data.shape[-2]
    each, columns = weight.group_shape
    if each == 1:
        return weight

    def spread(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        values = values.expand(*values.shape[:-2], rows, -1) if each == -1 else values.repeat_interleave(each, -2)
        return values.narrow(-2, 0, rows)

    return replace(weight, scales=spread(weight.scales), zeros=spread(weight.zeros), group_shape=(1, columns))
