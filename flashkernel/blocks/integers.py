"""Integers of 8 and 4 bits with float32 scales and zero points: quantization of groups, and nibbles in bytes.

A group is a rectangle of a matrix (`blocks/fp8.py`). Element = (q - zero) * scale, where a symmetric group has the
middle of the range as its zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashkernel.blocks.fp8 import expand_scales, group_count, in_groups, scales_for


@dataclass(frozen=True)
class IntegerRange:
    """The integers that a format stores.

    Args:
        dtype: Of the stored integers.
        least: The least one.
        most: The largest one.
        middle: What stands for 0 in a symmetric group, whose integers lie equally far on both sides of it.
    """

    dtype: torch.dtype
    least: int
    most: int
    middle: int


INT8 = IntegerRange(torch.int8, -128, 127, 0)
INT4 = IntegerRange(torch.uint8, 0, 15, 8)


def integer_scales(
    x: Tensor, group_shape: tuple[int, int], numbers: IntegerRange, symmetric: bool
) -> tuple[Tensor, Tensor | None]:
    """Returns (scales, zeros or None) of the groups of x (..., rows, columns), such that no element is cut off.

    Symmetric: the largest magnitude becomes 127 (of int8) or 7 (of int4) steps. Asymmetric: the range of the group and
    of 0 is divided into 255 or 15 steps.
    """
    wide = x.float()
    counts = [group_count(size, group) for size, group in zip(x.shape[-2:], group_shape)]
    if x.numel() == 0:
        shape = (*x.shape[:-2], *counts)
        zeros = None if symmetric else torch.full(shape, numbers.middle, dtype=numbers.dtype, device=x.device)
        return wide.new_ones(shape), zeros
    groups = in_groups(wide, group_shape)
    if symmetric:
        return scales_for(groups.abs().amax((-3, -1)), numbers.most - numbers.middle), None
    low, high = groups.amin((-3, -1)).clamp_max(0), groups.amax((-3, -1)).clamp_min(0)
    # Half of both: their difference may overflow.
    scales = scales_for(high * 0.5 - low * 0.5, 0.5 * (numbers.most - numbers.least))
    zeros = (numbers.least - (low * (1 / scales)).round()).clamp(numbers.least, numbers.most)
    return scales, zeros.to(numbers.dtype)


def round_to_integers(
    x: Tensor, scales: Tensor, zeros: Tensor | None, group_shape: tuple[int, int], numbers: IntegerRange
) -> Tensor:
    """Returns x * (1 / scale) + zero of each group, rounded to nearest even and clamped to the format's range."""
    steps = (x.float() * expand_scales(1 / scales, group_shape, x.shape)).round()
    if zeros is None:
        half = numbers.most - numbers.middle
        return (steps.clamp(-half, half) + numbers.middle).to(numbers.dtype)
    shifted = steps + expand_scales(zeros.float(), group_shape, x.shape)
    return shifted.clamp(numbers.least, numbers.most).to(numbers.dtype)


def quantize_int8_groups(x: Tensor, group_shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Returns x (..., rows, columns) in int8, symmetric, and the scales of its groups; the scale of zeros is 1."""
    scales, _ = integer_scales(x, group_shape, INT8, True)
    return round_to_integers(x, scales, None, group_shape, INT8), scales


def pack_nibbles(codes: Tensor) -> Tensor:
    """Returns values 0 to 15 (..., columns), two to a byte: column 2j in the low bits of byte j, 2j + 1 in the high.

    Example:
        >>> pack_nibbles(torch.tensor([[1, 2, 3, 15]], dtype=torch.uint8)).tolist()
        [[33, 243]]
    """
    pairs = codes.unflatten(-1, (codes.shape[-1] // 2, 2)).to(torch.uint8)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack_nibbles(data: Tensor) -> Tensor:
    """Returns the values 0 to 15 of bytes, uint8 (..., 2 * bytes): the inverse of `pack_nibbles`."""
    return torch.stack((data & 15, data >> 4), -1).flatten(-2)
