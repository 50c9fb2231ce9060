"""Experts by torch's own operators: a product for each expert that has rows."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flashkernel.blocks.epilogue import Epilogue, Operands
from flashkernel.blocks.gate_up import split_gate_up
from flashkernel.blocks.values import has_values
from flashkernel.blocks.weight import Weight
from flashkernel.ops.gemm import linear
from flashkernel.ops.moe import reference
from flashkernel.ops.moe.params import Experts
from flashkernel.ops.moe.routing.router import Routing

_linear: Any = linear  # returns one tensor or several, depending on its arguments


def moe_experts(x: Tensor, routing: Routing, experts: Experts) -> Tensor:
    """The host reads the offsets. A quantized weight is read by `linear`, one expert at a time."""
    if not has_values(routing.offsets):
        return reference.moe_experts(x, routing, experts)
    bounds = routing.offsets.tolist()  # a host sync
    wide = torch.promote_types(x.dtype, torch.float32)
    chain = Epilogue((experts.piece,))
    parts = []
    for index, (begin, end) in enumerate(pairwise(bounds)):
        if begin < end or (index == 0 and bounds[-1] == 0):  # without rows too, every argument has a gradient
            rows = x[routing.tokens[begin:end].long()]
            z = _product(rows, experts.gate_up, experts.gate_up_bias, index).to(wide)
            pair = split_gate_up(z, experts.packed) if experts.gate else (z,)
            hidden = chain.run(pair, Operands()).to(x.dtype)
            parts.append(_product(hidden, experts.down, experts.down_bias, index))
    y = torch.cat(parts)
    return combined(y, routing, x.dtype)


def combined(y: Tensor, routing: Routing, dtype: torch.dtype) -> Tensor:
    """The weighted sum of each token's rows y [rows, hidden], in the order of its slots."""
    wide = torch.promote_types(dtype, torch.float32)
    tokens = routing.positions.shape[0]
    total = y.new_zeros((tokens, y.shape[1]), dtype=wide)
    if y.shape[0] == 0:
        y = F.pad(y, (0, 0, 0, 1))  # what slots without a row read
    for positions, weights in zip(routing.positions.unbind(1), routing.weights.unbind(1)):
        # Both factors are 0 where there is no row: the derivative of a product has the other one, which may be NaN.
        used = positions >= 0
        rows = torch.where(used[:, None], y[positions.clamp(min=0).long()].to(wide), 0)
        total = total + rows * torch.where(used, weights, 0)[:, None]
    return total.to(dtype)


def _product(x: Tensor, weights: Tensor | Weight, biases: Tensor | None, index: int) -> Tensor:
    bias = None if biases is None else biases[index]
    if isinstance(weights, Weight):
        return _linear(x, weights[index], bias)
    return F.linear(x, weights[index], None if bias is None else bias.to(x.dtype))
