"""What grouped products are timed against."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks.epilogue import GATES
from flashkernel.blocks.gate_up import split_gate_up
from flashkernel.core.op import Case, Op
from flashkernel.ops.matmul.grouped.reference import activated


def torch_grouped_mm(op: Op, case: Case) -> Callable[..., Any]:
    """torch._grouped_mm (torch._scaled_grouped_mm of FP8, with `use_fast_accum` as the kernels have it), with torch's
    operators for all that is around it."""
    if "out_rows" in case.options or case.axes["tail"]:
        raise ValueError("torch._grouped_mm has no rows outside of groups")

    def run(
        x: Tensor, weights: Tensor, group_offsets: Tensor, gather: Tensor | None = None, scatter: Tensor | None = None,
        row_weights: Tensor | None = None, bias: Tensor | None = None, x_scale: Tensor | None = None,
        weight_scale: Tensor | None = None, activation: str | None = None, packed: str = "halves",
    ) -> Tensor:  # fmt: skip
        given = x if gather is None else x.index_select(0, gather)
        ends = group_offsets[1:]
        if x_scale is not None and weight_scale is not None:
            y = torch._scaled_grouped_mm(
                given, weights, x_scale, weight_scale, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
            )
        else:
            y = torch._grouped_mm(given, weights, offs=ends)
        if bias is not None:
            row = torch.arange(y.shape[0], device=y.device, dtype=torch.int32)
            y = y + bias.index_select(0, torch.searchsorted(ends, row, right=True))
        if activation is not None:
            y = _activated(y, activation, packed)
        if row_weights is not None:
            y = (y * row_weights[:, None]).to(y.dtype)
        return y if scatter is None else torch.empty_like(y).index_copy(0, scatter.long(), y)

    return run


def weight_gradient_grouped_mm(op: Op, case: Case) -> Callable[..., Any]:
    """torch._grouped_mm of two matrices, whose groups lie along the summed dim."""
    if case.axes["tail"]:
        raise ValueError("torch._grouped_mm has no rows outside of groups")

    def run(x: Tensor, dz: Tensor, group_offsets: Tensor, gather: Tensor | None = None) -> Tensor:
        given = x if gather is None else x.index_select(0, gather)
        return torch._grouped_mm(given.t(), dz, offs=group_offsets[1:])

    return run


_compiled_activation = torch.compile(activated, dynamic=False)


def _activated(z: Tensor, activation: str, packed: str) -> Tensor:
    """One elementwise kernel, as fast as torch makes it."""
    if activation in GATES and activation != "swiglu":
        return _compiled_activation(z, activation, packed)
    gate, up = split_gate_up(z, packed)
    return torch.nn.functional.silu(gate) * up if activation == "swiglu" else activated(z, activation, packed)


def loop(op: Op, case: Case) -> Callable[..., Any]:
    """A product for each group, with the offsets on the host ahead of time."""
    if case.present or case.options:
        raise ValueError("written for rows that are sorted by group")
    known: dict[int, list[int]] = {}

    def run(x: Tensor, weights: Tensor, group_offsets: Tensor) -> Tensor:
        bounds = known.setdefault(group_offsets.data_ptr(), [])
        if not bounds:
            bounds += group_offsets.tolist()
        return torch.cat([x[first:last] @ matrix for (first, last), matrix in zip(pairwise(bounds), weights)])

    return run
