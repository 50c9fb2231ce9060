"""The memory order of quantized weights: tiles where a Hopper GPU's kernel reads them, rows everywhere else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import flashkernel as fk
from flashkernel import Weight
from flashkernel.blocks.weight_formats import tiles
from flashkernel.core import cuda
from flashkernel.core.device import properties

_linear: Any = fk.linear


def kernel_order(weight: Any, dtype: torch.dtype) -> Any:
    """A matrix in the order that the kernels of its device read fastest.

    A matrix in int4, int8 or MXFP4 is put into tiles (`Weight.tiled`) if dispatch then takes the kernel for tiles.
    Everything else is returned as it is: plain tensors, sizes or scales that tiles do not have, and stacks of experts,
    which `experts_order` puts into tiles.

    Args:
        weight: A tensor, a `Weight`, or a tuple of them.
        dtype: Of the activations.
    """
    if isinstance(weight, tuple):
        return tuple(kernel_order(one, dtype) for one in weight)
    if not isinstance(weight, Weight) or weight.ndim != 2 or not _may_be_tiled(weight):
        return weight
    tiled = _tiled(weight)
    if tiled is None:
        return weight
    x = torch.empty((1, weight.shape[1]), dtype=dtype, device=weight.device)
    return tiled if fk.explain(_linear, x, tiled).chosen == "hopper" else weight


def experts_order(gate_up: Any, down: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    """The stacks of a layer's experts in the order that the kernels of their device read fastest.

    Both are put into tiles if both are in int4, int8 or MXFP4 and have sizes of tiles; else both stay as they are.

    Args:
        gate_up: A tensor or a `Weight`, (experts, wide, hidden).
        down: Likewise, (experts, hidden, inner).
        dtype: Of the activations.
    """
    given = (gate_up, down)
    stacks = all(isinstance(one, Weight) and one.ndim == 3 and _may_be_tiled(one) for one in given)
    if not stacks or dtype not in (torch.float16, torch.bfloat16) or cuda.available() is not None:
        return given
    up, lower = (tiled_stack(one) for one in given)
    return given if up is None or lower is None else (up, lower)


def layer_order(projections: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """A layer's projections by name, each in the order that the kernels of its device read fastest."""
    found = {name: kernel_order(weight, dtype) for name, weight in projections.items()}
    found["gate_up_proj"], found["down_proj"] = experts_order(found["gate_up_proj"], found["down_proj"], dtype)
    return found


def tiled_stack(weight: Weight) -> Weight | None:
    """A stack in tiles, made of one expert after the other: all of them at once take several times the memory."""
    found = []
    for one in range(len(weight)):
        tiled = _tiled(weight[one])
        if tiled is None:
            return None
        found.append(tiled)
    return Weight.stack(found) if found else None


def _may_be_tiled(weight: Weight) -> bool:
    device = properties(weight.device)
    hopper = device.kind == "cuda" and device.arch == 90
    return hopper and weight.format + tiles.SUFFIX in tiles.FORMATS and weight.activation_dtype is None


def _tiled(weight: Weight) -> Weight | None:
    """None for sizes or scales that tiles do not have: kernels of rows serve them."""
    try:
        return weight.tiled()
    except ValueError:
        return None


def row_order(weight: Any) -> Any:
    """A weight in rows, as checkpoints store it; scales of int4 and int8 in tiles were rounded to float16."""
    if isinstance(weight, Weight) and weight.format in tiles.FORMATS:
        return tiles.FORMATS[weight.format].row_major(weight)
    return weight
