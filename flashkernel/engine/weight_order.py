"""The memory order of quantized weights: tiles where a Hopper GPU's kernel reads them, rows everywhere else."""

from __future__ import annotations

from typing import Any

import torch

import flashkernel as fk
from flashkernel import Weight
from flashkernel.blocks.weight_formats import tiles
from flashkernel.core.device import properties

_linear: Any = fk.linear


def kernel_order(weight: Any, dtype: torch.dtype) -> Any:
    """A weight in the order that the kernels of its device read fastest.

    A matrix in int4, int8 or MXFP4 is put into tiles (`Weight.tiled`) if dispatch then takes the kernel for tiles.
    Everything else is returned as it is: plain tensors, stacks of experts, sizes or scales that tiles do not have.

    Args:
        weight: A tensor, a `Weight`, or a tuple of them.
        dtype: Of the activations.
    """
    if isinstance(weight, tuple):
        return tuple(kernel_order(one, dtype) for one in weight)
    if not isinstance(weight, Weight) or weight.ndim != 2 or weight.format + tiles.SUFFIX not in tiles.FORMATS:
        return weight
    device = properties(weight.device)
    if device.kind != "cuda" or device.arch != 90 or weight.activation_dtype is not None:
        return weight
    try:
        tiled = weight.tiled()
    except ValueError:  # sizes or scales that tiles do not have: kernels of rows serve it
        return weight
    x = torch.empty((1, weight.shape[1]), dtype=dtype, device=weight.device)
    return tiled if fk.explain(_linear, x, tiled).chosen == "hopper" else weight


def row_order(weight: Any) -> Any:
    """The inverse of `kernel_order`, as checkpoints store weights; scales in tiles were rounded to float16."""
    if isinstance(weight, Weight) and weight.format in tiles.FORMATS:
        return tiles.FORMATS[weight.format].row_major(weight)
    return weight
