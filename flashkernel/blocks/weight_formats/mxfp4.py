"""The format "mxfp4": e2m1 values with a power-of-two scale for each 32 columns, as gpt-oss stores its experts."""

from __future__ import annotations

import torch
from torch import Tensor

from flashkernel.blocks import e2m1
from flashkernel.blocks.fp8 import FP8
from flashkernel.blocks.integers import pack_nibbles, unpack_nibbles
from flashkernel.blocks.weight import Layout, Weight, register_format
from flashkernel.blocks.weight_formats.grouped import FixedGroupsFormat, scales_of


class Mxfp4(FixedGroupsFormat):
    """e2m1 values, two to a byte, with e8m0 scales for each 32 columns of a row.

    data is uint8 (out, in / 2), row-major: byte (i, j) has column 2j of row i in its low four bits and column 2j + 1 in
    its high four bits. A code's lowest bit is the fraction, the next two the exponent, the highest the sign: codes 0 to
    7 are 0, 0.5, 1, 1.5, 2, 3, 4 and 6. scales are uint8 (out, in / 32), exponents biased by 127; 255 stands for NaN.
    Element (i, j) = value * 2^(scales[i, j // 32] - 127). in is a multiple of 32.

    gpt-oss has the same bytes as `*_blocks` (experts, out, in / 32, 16) and `*_scales` (experts, out, in / 32);
    `Weight.pack` takes either shape.
    """

    name = "mxfp4"
    data_dtype = torch.uint8
    scale_dtype = torch.uint8
    packing = 2
    activation_dtypes = (torch.int8, FP8)
    columns = multiple = e2m1.GROUP

    def dequantize(self, weight: Weight, dtype: torch.dtype) -> Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        values = e2m1.decode(unpack_nibbles(weight.data), wide)
        scales = e2m1.scale_values(scales_of(weight), wide)
        return (values.unflatten(-1, (scales.shape[-1], e2m1.GROUP)) * scales[..., None]).flatten(-2).to(dtype)

    def quantize(self, tensor: Tensor, group_shape: tuple[int, int], symmetric: bool) -> Weight:
        self.check_symmetric(symmetric)
        self.check_group(group_shape, tensor.shape[-1])
        scales = e2m1.scale_exponents(tensor)
        steps = tensor.float().unflatten(-1, (scales.shape[-1], e2m1.GROUP))
        codes = e2m1.encode(steps / e2m1.scale_values(scales, torch.float32)[..., None]).flatten(-2)
        return Weight(pack_nibbles(codes), scales, format="mxfp4", group_shape=group_shape)

    def pack(self, data: Tensor, scales: Tensor | None, zeros: Tensor | None) -> Weight:
        if scales is not None and data.ndim == scales.ndim + 1 and data.shape[-1] == e2m1.GROUP // 2:
            data = data.flatten(-2)  # gpt-oss's blocks
        if scales is None or scales.dtype != torch.uint8:
            given = "none were given" if scales is None else f"they are {scales.dtype}"
            raise ValueError(f"Weight.pack: mxfp4 data comes with scales in uint8, exponents biased by 127; {given}")
        return Weight(data, scales, zeros, "mxfp4", (1, e2m1.GROUP))

    def declines(self, backend: str, layout: Layout) -> str | None:
        if layout.activation_dtype == FP8:  # rounded by a launch before theirs
            layout = layout._replace(activation_dtype=None)
        return super().declines(backend, layout)


register_format(Mxfp4())
