"""What torch's functions are of expressions: masks and score functions that were written for FlexAttention run as they
are."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks import nodes
from flashkernel.blocks.nodes import BOOLEAN, INTEGER, Expression, Table, lift, number, where
from flashkernel.blocks.source import nonnegative


def _read(tensor: Tensor, indices: Any) -> Expression:
    """tensor[indices]; indices below zero count from the end, as torch's do."""
    table, given = Table(tensor), indices if isinstance(indices, tuple) else (indices,)
    if len(given) == tensor.ndim:
        given = tuple([_from_the_start(index, size) for index, size in zip(given, tensor.shape)])
    return table[given]


def _from_the_start(index: Any, size: int) -> Any:
    lifted = lift(index)
    if lifted.kind != INTEGER or nonnegative(lifted):
        return lifted
    return where(lifted < 0, lifted + size, lifted)


def condition_of(value: Any) -> Expression:
    """A value as torch's logical functions take it: what is not 0 is true."""
    lifted = lift(value)
    return lifted if lifted.kind == BOOLEAN else lifted != 0


nodes.TORCH_FUNCTIONS |= {
    Tensor.__getitem__: _read,
    torch.where: where,
    torch.minimum: nodes.minimum,
    torch.maximum: nodes.maximum,
    torch.tanh: nodes.tanh,
    torch.exp: nodes.exp,
    torch.exp2: lambda value: nodes.exp(number(value) * math.log(2)),
    torch.abs: nodes.absolute,
    torch.logical_and: lambda a, b: condition_of(a) & condition_of(b),
    torch.logical_or: lambda a, b: condition_of(a) | condition_of(b),
    torch.logical_not: lambda value: condition_of(value).logical_not(),
}
