"""A broadcast mask as kernels read it: where each row of x finds its row of the mask."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MaskRows:
    """Row r of x is (outer, middle, inner) = r in mixed radix; its mask begins at the dot product with `strides`."""

    tensor: torch.Tensor | None  # uint8, any strides
    sizes: tuple[int, int]  # middle, inner
    strides: tuple[int, int, int, int]  # outer, middle, inner, column


NO_MASK = MaskRows(None, (1, 1), (0, 0, 0, 0))


def mask_rows(mask: torch.Tensor | None, shape: torch.Size) -> MaskRows:
    """`mask`, broadcast to `shape`, without a copy wherever its leading dims fold into three strides."""
    if mask is None:
        return NO_MASK
    seen = mask.expand(shape)
    folded = _fold(seen.shape[:-1], seen.stride()[:-1])
    if len(folded) > 3:
        seen = seen.contiguous()
        folded = _fold(seen.shape[:-1], seen.stride()[:-1])
    padded = [(1, 0)] * (3 - len(folded)) + folded
    (_, outer), (middle, middle_stride), (inner, inner_stride) = padded
    return MaskRows(seen.view(torch.uint8), (middle, inner), (outer, middle_stride, inner_stride, seen.stride(-1)))


def _fold(sizes: torch.Size, strides: tuple[int, ...]) -> list[tuple[int, int]]:
    """Neighbouring dims that one stride can walk become one; those of size 1 vanish."""
    folded: list[tuple[int, int]] = []
    for size, stride in zip(sizes, strides):
        if size == 1:
            continue
        if folded and folded[-1][1] == size * stride:
            folded[-1] = (folded[-1][0] * size, stride)
        else:
            folded.append((size, stride))
    return folded
