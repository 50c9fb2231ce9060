"""A broadcast mask as kernels read it: where each row of x finds its row of the mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


class MaskLayout(NamedTuple):
    """Row r of x is (outer, middle, inner) = r in mixed radix; its mask begins at the dot product with the strides."""

    middle: int
    inner: int
    outer_stride: int
    middle_stride: int
    inner_stride: int
    column_stride: int


@dataclass(frozen=True)
class MaskRows:
    """A mask and where each row of x finds its row of it."""

    tensor: torch.Tensor | None  # uint8, any strides
    layout: MaskLayout


NO_MASK = MaskRows(None, MaskLayout(1, 1, 0, 0, 0, 0))


class Scores(NamedTuple):
    """What a softmax does to its rows: scale * x where the mask, and causality, let a row see."""

    scale: float = 1.0
    seqlen_q: int = 0  # of a causal softmax, whose rows are queries; else 0
    mask: MaskRows = NO_MASK


PLAIN = Scores()
Pair = tuple[torch.Tensor, torch.Tensor]


def mask_rows(mask: torch.Tensor | None, shape: torch.Size) -> MaskRows:
    """`mask`, broadcast to `shape`, without a copy wherever its leading dims fold into three strides."""
    if mask is None:
        return NO_MASK
    visible = mask.expand(shape)
    folded = _fold(visible.shape[:-1], visible.stride()[:-1])
    if len(folded) > 3:
        visible = visible.contiguous()
        folded = _fold(visible.shape[:-1], visible.stride()[:-1])
    padded = [(1, 0)] * (3 - len(folded)) + folded
    (_, outer), (middle, middle_stride), (inner, inner_stride) = padded
    layout = MaskLayout(middle, inner, outer, middle_stride, inner_stride, visible.stride(-1))
    return MaskRows(visible.view(torch.uint8), layout)


def _fold(sizes: torch.Size, strides: tuple[int, ...]) -> list[tuple[int, int]]:
    """Neighboring dims that one stride covers become one; those of size 1 vanish."""
    folded: list[tuple[int, int]] = []
    for size, stride in zip(sizes, strides):
        if size == 1:
            continue
        if folded and folded[-1][1] == size * stride:
            folded[-1] = (folded[-1][0] * size, stride)
        else:
            folded.append((size, stride))
    return folded
