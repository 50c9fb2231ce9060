"""What keeps the loads of experts equal: losses, and a bias that needs no loss."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flashkernel.core.argument_types import type_checked
from flashkernel.core.arguments import is_float
from flashkernel.ops.moe.routing.router import Routing

BALANCE_LOSSES = ("switch", "cv", "z")


@type_checked
def moe_balance_loss(logits: Tensor, routing: Routing, kind: str = "switch") -> Tensor:
    """Returns a loss that is low where experts are used alike, to be added to a model's own with a small factor.

    - "switch": experts * sum over e of f_e P_e, where f_e is the share of the slots that chose expert e and P_e the
      mean probability of e (Switch Transformer). It is 1 where both are uniform.
    - "cv": the squared coefficient of variation of the experts' importance, the sums of their routing weights:
      variance / mean^2. It is 0 where they are equal.
    - "z": the mean of logsumexp(logits)^2, which keeps logits small (ST-MoE).

    Nothing waits for the GPU.

    Args:
        logits: (tokens, experts): what was routed. Differentiable, "cv" through the routing weights instead.
        routing: what `moe_route` returned for them.
        kind: "switch", "cv" or "z".

    Returns:
        A scalar, float32 (of float64 logits float64); 0 without tokens.

    Example:
        >>> import torch, flashkernel as fk
        >>> logits = torch.zeros(4, 2).requires_grad_()
        >>> routing = fk.moe_route(logits, fk.Router("softmax", 1))  # of equal logits the first: expert 0 gets all
        >>> [round(fk.moe_balance_loss(logits, routing, kind).item(), 3) for kind in ("switch", "cv", "z")]
        [1.0, 1.0, 0.48]
    """
    if kind not in BALANCE_LOSSES:
        raise ValueError(f"moe_balance_loss: kind is {kind!r}; it must be one of {', '.join(BALANCE_LOSSES)}")
    if logits.ndim != 2 or not is_float(logits):
        raise ValueError(
            f"moe_balance_loss: logits are {logits.dtype} {tuple(logits.shape)}; they must be float (tokens, experts)"
        )
    tokens, experts = logits.shape
    routed = routing.positions.shape[0], routing.counts.shape[0]
    if routed != (tokens, experts):
        raise ValueError(
            f"moe_balance_loss: the routing is of {routed[0]} tokens and {routed[1]} experts; logits are of "
            f"{tokens} and {experts}"
        )
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if tokens == 0:
        return wide.sum()
    if kind == "z":
        return torch.logsumexp(wide, 1).square().mean()
    if kind == "switch":
        share = routing.counts.to(wide.dtype) / routing.counts.sum().clamp(min=1)
        return experts * (share * torch.softmax(wide, 1).mean(0)).sum()
    used = routing.experts >= 0
    index = torch.where(used, routing.experts, 0).flatten().long()
    weights = torch.where(used, routing.weights, 0).flatten()
    importance = weights.new_zeros(experts).scatter_add(0, index, weights)
    return importance.var(correction=0) / (importance.mean().square() + 1e-20)


@type_checked
@torch.no_grad()
def moe_balance_bias(bias: Tensor, routing: Routing, rate: float = 1e-3) -> Tensor:
    """Moves the bias of a "sigmoid" router so that experts with few tokens are chosen more often; no loss is needed.

    bias += rate * sign(mean load - load), as DeepSeek-V3 does once a step. Nothing waits for the GPU.

    Args:
        bias: (experts,) float, the `bias` of `moe_route`; changed in place. In float32: half precision rounds small
            steps away.
        routing: of the step.
        rate: how far it moves.

    Returns:
        The bias.

    Example:
        >>> import torch, flashkernel as fk
        >>> routing = fk.moe_route(torch.tensor([[2.0, 1.0, 0.0], [2.0, 0.0, 1.0]]), fk.Router("sigmoid", 1))
        >>> fk.moe_balance_bias(torch.zeros(3), routing, 0.5)
        tensor([-0.5000,  0.5000,  0.5000])
    """
    experts = routing.counts.shape[0]
    if tuple(bias.shape) != (experts,) or not is_float(bias):
        raise ValueError(
            f"moe_balance_bias: bias is {bias.dtype} {tuple(bias.shape)}; it must be float ({experts},), for the "
            f"{experts} experts of the routing"
        )
    if not math.isfinite(rate):
        raise ValueError(f"moe_balance_bias: rate is {rate}; it must be a finite number")
    load = routing.counts.double()
    return bias.add_(torch.sign(load.mean() - load).to(bias.dtype), alpha=rate)
