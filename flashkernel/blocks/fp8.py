"""float8_e4m3fn with float32 scales: quantization of groups of elements, and what torch's own fp8 product takes.

A group is a rectangle of a matrix, (rows, columns), whose elements share a scale; a size of -1 stands for all rows or
all columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from flashkernel.core import device

FP8 = torch.float8_e4m3fn
SCALE_BLOCK = 128  # elements of a dim that share a scale in block scaling, as DeepSeek-V3 stores its weights


def group_count(size: int, each: int) -> int:
    """The number of groups of `each` elements along a dim of `size`."""
    return 1 if each == -1 else -(-size // each)


def expand_scales(scales: Tensor, group_shape: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Scales (row groups, column groups) as a matrix of `shape` is multiplied by them: a dim is the matrix's, or 1."""
    for dim, each in zip((-2, -1), group_shape):
        if each > 1:
            scales = scales.repeat_interleave(each, dim).narrow(dim, 0, shape[dim])
    return scales


def in_groups(x: Tensor, group_shape: Sequence[int]) -> Tensor:
    """Returns x (..., rows, columns) as (..., row groups, rows of one, column groups, columns of one).

    Zeros fill up groups that the matrix does not.
    """
    sizes = x.shape[-2:]
    each = [size if group == -1 else group for size, group in zip(sizes, group_shape)]
    counts = [group_count(size, group) for size, group in zip(sizes, group_shape)]
    padding = (0, counts[1] * each[1] - sizes[1], 0, counts[0] * each[0] - sizes[0])
    padded = F.pad(x, padding) if any(padding) else x
    return padded.unflatten(-1, (counts[1], each[1])).unflatten(-3, (counts[0], each[0]))


def scales_for(largest: Tensor, most: float) -> Tensor:
    """Returns the scales by which groups whose largest magnitudes are `largest` fit into [-most, most]; 1 for zeros."""
    smallest = torch.finfo(torch.float32).tiny  # a quotient that rounds to 0 would divide by it
    return torch.where(largest > 0, (largest * (1.0 / most)).clamp_min(smallest), 1.0)


def quantize_fp8_groups(x: Tensor, group_shape: tuple[int, int], dtype: torch.dtype = FP8) -> tuple[Tensor, Tensor]:
    """Returns x (..., rows, columns) in 8-bit floats and the scales of its groups.

    The largest element of a group becomes the largest number of the dtype: 448 of float8_e4m3fn, 57344 of float8_e5m2.
    The scale of zeros is 1.
    """
    wide, most = x.float(), torch.finfo(dtype).max
    if x.numel() == 0:
        counts = [group_count(size, group) for size, group in zip(x.shape[-2:], group_shape)]
        return x.to(dtype), wide.new_ones((*x.shape[:-2], *counts))
    scales = scales_for(in_groups(wide.abs(), group_shape).amax((-3, -1)), most)
    return round_to_fp8(wide, scales, group_shape, dtype), scales


def round_to_fp8(x: Tensor, scales: Tensor, group_shape: tuple[int, int], dtype: torch.dtype = FP8) -> Tensor:
    """Returns x * (1 / scale) of each group in 8-bit floats, rounded to nearest; what is too large saturates."""
    most = torch.finfo(dtype).max
    return (x.float() * expand_scales(1 / scales, group_shape, x.shape)).clamp(-most, most).to(dtype)


def scaled_mm_takes(b: Tensor) -> bool:
    """Whether torch._scaled_mm multiplies by b [K, N] on its GPU: fp8, contiguous along K, sizes multiples of 16."""
    return (
        b.is_cuda
        and b.dtype == FP8
        and b.ndim == 2
        and b.numel() > 0
        and device.properties(b.device).arch >= 89
        and b.stride(0) == 1
        and all(size % 16 == 0 for size in (*b.shape, b.stride(1)))
    )


def block_scaled_mm_missing() -> str | None:
    """The reason why torch._scaled_mm has no products with scales of blocks here (1 x 128 of a, 128 x 128 of b)."""
    version = torch.version.cuda
    if version is None or tuple(map(int, version.split(".")[:2])) < (12, 9) or not torch.cuda.is_available():
        return f"cuBLAS has products with scales of blocks from CUDA 12.9 on; this torch has CUDA {version}"
    arch = torch.cuda.get_device_capability()
    return (
        None if arch == (9, 0) else f"cuBLAS has products with scales of blocks on sm_90, not on sm_{arch[0]}{arch[1]}"
    )


def cublas_block_scales(a_scale: Tensor, b_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Scales (M, K / 128) and (K / 128, N / 128) in the memory layout that cuBLAS reads: a's along M; b's along K, rows
    at multiples of 16 bytes."""
    columns = F.pad(b_scale.t(), (0, -b_scale.shape[0] % 4)).contiguous()  # [N / 128, K / 128]
    return a_scale.t().contiguous().t(), columns[:, : b_scale.shape[0]].t()
