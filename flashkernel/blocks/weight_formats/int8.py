"""The format "int8": 8-bit integers, symmetric or with zero points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flashkernel.blocks.fp8 import expand_scales
from flashkernel.blocks.integers import INT8, IntegerRange, integer_scales, round_to_integers
from flashkernel.blocks.weight import Weight, format_named, register_format
from flashkernel.blocks.weight_formats.grouped import GroupedFormat, scales_of


class IntegerFormat(GroupedFormat):
    """Integers with float32 scales and, if asymmetric, zero points: element = (q - zero) * scale."""

    has_zeros = True
    numbers: IntegerRange

    def store(self, codes: Tensor) -> Tensor:
        """The integers of a matrix (..., out, in) as data."""
        return codes

    def codes(self, data: Tensor) -> Tensor:
        """The integers of the data, (..., out, in)."""
        return data

    def concatenate(self, weights: Sequence[Weight]) -> Weight:
        return super().concatenate(with_zeros(weights))

    def dequantize(self, weight: Weight, dtype: torch.dtype) -> Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        values = self.codes(weight.data).to(wide)
        if weight.zeros is not None:
            values = values - expand_scales(weight.zeros.to(wide), weight.group_shape, values.shape)
        elif self.numbers.middle:
            values = values - self.numbers.middle
        return (values * expand_scales(scales_of(weight).to(wide), weight.group_shape, values.shape)).to(dtype)

    def quantize(self, tensor: Tensor, group_shape: tuple[int, int], symmetric: bool) -> Weight:
        self.check_group(group_shape, tensor.shape[-1])
        scales, zeros = integer_scales(tensor, group_shape, self.numbers, symmetric)
        codes = round_to_integers(tensor, scales, zeros, group_shape, self.numbers)
        return Weight(self.store(codes), scales, zeros, self.name, group_shape)


def with_zeros(weights: Sequence[Weight]) -> list[Weight]:
    """Weights of one format of integers, where one has zero points all of them: the middle, for symmetric ones."""
    format = format_named(weights[0].format)
    if not isinstance(format, IntegerFormat) or all(weight.zeros is None for weight in weights):
        return list(weights)

    def completed(weight: Weight) -> Weight:
        if weight.zeros is not None:
            return weight
        middle = torch.full_like(scales_of(weight), format.numbers.middle, dtype=format.data_dtype)
        return replace(weight, zeros=middle)

    return [completed(weight) for weight in weights]


class Int8(IntegerFormat):
    """int8 with float32 scales for the tensor, its rows, or groups and blocks of it.

    data is int8 (out, in). Symmetric: integers -127 to 127, element (i, j) = data[i, j] * scales[g]. Asymmetric:
    integers -128 to 127 and int8 zeros of the scales' shape, element (i, j) = (data[i, j] - zeros[g]) * scales[g].
    """

    name = "int8"
    data_dtype = torch.int8
    activation_dtypes = (torch.int8,)
    numbers = INT8


register_format(Int8())
