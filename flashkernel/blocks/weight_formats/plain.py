"""The format "plain": a tensor of floats as it is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashkernel.blocks.weight import Layout, Weight, register_format


class Plain:
    """Floats as they are: data is the matrix itself, float32, float16 or bfloat16 (out, in)."""

    name = "plain"

    def shape(self, data: Tensor) -> torch.Size:
        return data.shape

    def error(self, weight: Weight) -> str | None:
        if weight.scales is not None or weight.zeros is not None or weight.activation_dtype is not None:
            return "a plain weight has no scales, no zeros and no activation_dtype"
        if weight.data.dtype.itemsize < 2 or not weight.data.is_floating_point() or weight.data.ndim < 2:
            return f"plain data is {weight.data.dtype} {tuple(weight.data.shape)}; it must be a float matrix (out, in)"
        return None

    def dequantize(self, weight: Weight, dtype: torch.dtype) -> Tensor:
        return weight.data.to(dtype)

    def default_group(self, columns: int) -> tuple[int, int]:
        return -1, -1

    def quantize(self, tensor: Tensor, group_shape: tuple[int, int], symmetric: bool) -> Weight:
        return Weight(tensor)

    def pack(self, data: Tensor, scales: Tensor | None, zeros: Tensor | None) -> Weight:
        return Weight(data, scales, zeros)

    def rows(self, weight: Weight, rows: slice) -> Weight:
        return Weight(weight.data[..., rows, :])

    def concatenate(self, weights: Sequence[Weight]) -> Weight:
        return Weight(torch.cat([weight.data for weight in weights], -2))

    def declines(self, backend: str, layout: Layout) -> str | None:
        return None


register_format(Plain())
