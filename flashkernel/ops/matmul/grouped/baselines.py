"""What grouped products are timed against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashkernel.core.op import Case, Op


def torch_grouped_mm(op: Op, case: Case) -> Callable[..., Any]:
    """torch._grouped_mm on rows that are sorted by group."""
    if case.present or case.options:
        raise ValueError("torch._grouped_mm has no gather, scatter, row weights or bias")

    def run(x: Tensor, weights: Tensor, group_offsets: Tensor) -> Tensor:
        return torch._grouped_mm(x, weights, offs=group_offsets[1:])

    return run


def loop(op: Op, case: Case) -> Callable[..., Any]:
    """A product for each group, with the offsets on the host ahead of time."""
    if case.present or case.options:
        raise ValueError("written for rows that are sorted by group")
    known: dict[int, list[int]] = {}

    def run(x: Tensor, weights: Tensor, group_offsets: Tensor) -> Tensor:
        bounds = known.setdefault(group_offsets.data_ptr(), [])
        if not bounds:
            bounds += group_offsets.tolist()
        return torch.cat([x[first:last] @ matrix for first, last, matrix in zip(bounds, bounds[1:], weights)])

    return run
