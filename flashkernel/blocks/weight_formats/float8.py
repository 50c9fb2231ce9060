"""The formats "fp8" (float8_e4m3fn) and "fp8_e5m2" (float8_e5m2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashkernel.blocks.fp8 import FP8, expand_scales, quantize_fp8_groups
from flashkernel.blocks.weight import GRANULARITIES, Layout, Weight, register_format
from flashkernel.blocks.weight_formats.grouped import GroupedFormat, scales_of


class Float8(GroupedFormat):
    """8-bit floats with float32 scales for the tensor, its rows, or blocks of it.

    data is (out, in) in the dtype itself. Element (i, j) = data[i, j] * scales[i // rows, j // columns]. The last
    groups of a matrix may be smaller.

    Args:
        name: Of the format.
        dtype: Of data.
        activation_dtypes: What x may be rounded to.
    """

    def __init__(self, name: str, dtype: torch.dtype, activation_dtypes: tuple[torch.dtype, ...]) -> None:
        self.name, self.data_dtype, self.activation_dtypes = name, dtype, activation_dtypes

    def dequantize(self, weight: Weight, dtype: torch.dtype) -> Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        scales = expand_scales(scales_of(weight).to(wide), weight.group_shape, weight.data.shape)
        return (weight.data.to(wide) * scales).to(dtype)

    def quantize(self, tensor: Tensor, group_shape: tuple[int, int], symmetric: bool) -> Weight:
        self.check_symmetric(symmetric)
        data, scales = quantize_fp8_groups(tensor, group_shape, self.data_dtype)
        return Weight(data, scales, format=self.name, group_shape=group_shape)

    def stored_group(self, shape: Sequence[int], scales: tuple[int, ...]) -> tuple[int, int]:
        """Groups and blocks have 128 columns; the last ones may be smaller."""
        for group in GRANULARITIES.values():
            if scales == self.scale_shape(shape, group):
                return group
        try:
            return super().stored_group(shape, scales)
        except ValueError:
            raise ValueError(
                f"Weight.pack: {self.name} data {tuple(shape)} has one scale, one for each row, or one for each 128 "
                f"columns of a row or of 128 rows; scales {scales} are none of these"
            ) from None

    def declines(self, backend: str, layout: Layout) -> str | None:
        if self.data_dtype != FP8 or backend != "triton":
            return f"its kernels read float weights, not {self.name}"
        if layout.group_shape not in (GRANULARITIES["tensor"], GRANULARITIES["row"]):
            return "its kernels apply scales to finished sums: one for the tensor or for each row, not for blocks"
        if layout.activation_dtype is not None:
            return "its kernels take x as it is; this weight asks for x in 8 bits"
        return None


register_format(Float8("fp8", FP8, (FP8,)))
register_format(Float8("fp8_e5m2", torch.float8_e5m2, (FP8,)))
