"""Experts in plain torch: every expert on every token, in whatever precision it is given. The ground truth."""

from __future__ import annotations

import torch
from torch import Tensor

from flashkernel.blocks.activation import FORMULAS, apply_gate
from flashkernel.blocks.epilogue import Gate
from flashkernel.blocks.gate_up import split_gate_up
from flashkernel.blocks.weight import Weight, rounded_activations
from flashkernel.ops.moe.params import Experts, dense
from flashkernel.ops.moe.routing.router import Routing


def moe_experts(x: Tensor, routing: Routing, experts: Experts) -> Tensor:
    """out[t] = sum over the token's slots j of weights[t, j] * expert_j(x[t]); dropped slots add nothing."""
    gate_up, down = dense(experts.gate_up, x.dtype), dense(experts.down, x.dtype)
    total = x.new_zeros((x.shape[0], down.shape[1]), dtype=torch.promote_types(x.dtype, torch.float32))
    kept = routing.positions >= 0
    for index in range(experts.count):
        z = rounded(x, experts.gate_up) @ gate_up[index].t()
        z = z if experts.gate_up_bias is None else z + experts.gate_up_bias[index]
        y = rounded(activated(z, experts), experts.down) @ down[index].t()
        y = y if experts.down_bias is None else y + experts.down_bias[index]
        mine = kept & (routing.experts == index)
        weight = torch.where(mine, routing.weights, 0).sum(1, keepdim=True)
        total = total + torch.where(mine.any(1, keepdim=True), weight * y, 0)
    return total.to(x.dtype)


def rounded(x: Tensor, weight: Tensor | Weight) -> Tensor:
    """x as a weight asks for it."""
    return rounded_activations(x, weight) if isinstance(weight, Weight) else x


def activated(z: Tensor, experts: Experts) -> Tensor:
    """activation(z) [rows, intermediate]"""
    piece = experts.piece
    if isinstance(piece, Gate):
        return apply_gate(FORMULAS, piece.kind, *split_gate_up(z, experts.packed), piece.alpha, piece.limit)
    return FORMULAS[piece.kind](z)
