"""MXFP4 experts as a dense stack, for products of many tokens and for gradients: one pass, nothing held in float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashkernel.blocks.dequantize_triton import dequantize
from flashkernel.blocks.weight import Weight
from flashkernel.blocks.weight_formats.tiles import FORMATS, SUFFIX
from flashkernel.core import tune
from flashkernel.core.launch import launch
from flashkernel.ops.moe.triton.few_tokens import decode_e2m1, scale_factor


@triton.jit
def dequantize_kernel(
    codes, scales, out, rows, groups, row_stride, scale_stride, ROWS: tl.constexpr, GROUPS: tl.constexpr
):
    """ROWS rows of GROUPS groups of 32 columns: out[row, column] = e2m1 value * scale of its group."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    group, byte = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS), tl.arange(0, 16)
    inside = (row < rows)[:, None] & (group < groups)[None, :]
    scale = tl.load(scales + row[:, None] * scale_stride + group[None, :], mask=inside, other=127)
    offset = row[:, None, None] * row_stride + group[None, :, None] * 16 + byte[None, None, :]
    code = tl.load(codes + offset, mask=inside[:, :, None], other=0).to(tl.int32)
    factor = scale_factor(scale)
    low, high = (
        decode_e2m1(code & 15, factor, out.dtype.element_ty),
        decode_e2m1(code >> 4, factor, out.dtype.element_ty),
    )
    column = tl.program_id(1) * GROUPS * 32 + tl.arange(0, GROUPS * 32)
    value = tl.reshape(tl.join(low, high), [ROWS, GROUPS * 32])
    written = (row < rows)[:, None] & (column < groups * 32)[None, :]
    tl.store(out + row[:, None] * (groups * 32) + column[None, :], value, mask=written)


def dense(weight: Tensor | Weight, dtype: torch.dtype) -> Tensor:
    """The weights of all experts as a tensor [experts, out, in]: by one kernel in int4, int8, MXFP4 and tiles of these,
    else by torch."""
    if isinstance(weight, Tensor):
        return weight
    has_kernel = weight.format.removesuffix(SUFFIX) + SUFFIX in FORMATS and weight.group_shape[0] == 1
    if has_kernel and weight.format != "mxfp4":
        return dequantize(weight, dtype)
    scales = weight.scales
    if weight.format != "mxfp4" or scales is None or not weight.data.is_contiguous() or not scales.is_contiguous():
        return weight.dequantize(dtype)
    out = torch.empty(tuple(weight.shape), dtype=dtype, device=weight.device)
    if out.numel():
        codes, flat = weight.data.flatten(0, 1), scales.flatten(0, 1)
        rows, groups = flat.shape
        launch(
            dequantize_kernel, (tune.ceil_div(rows, 16), tune.ceil_div(groups, 8)), codes, flat, out, rows, groups,
            codes.stride(0), flat.stride(0), ROWS=16, GROUPS=8, num_warps=4,
        )  # fmt: skip
    return out
