"""The public router: argument checks and dispatch."""

from __future__ import annotations

import torch
from torch import Tensor

from flashkernel.core.argument_types import type_checked
from flashkernel.core.arguments import is_float, needs_gradients, without_autocast
from flashkernel.core.dispatch import choose
from flashkernel.core.replay import replayed
from flashkernel.ops.moe.routing import library, spec
from flashkernel.ops.moe.routing.router import Router, Routing

MAX_EXPERTS = 1024


@type_checked
def moe_route(
    logits: Tensor,
    router: Router | None = None,
    *,
    bias: Tensor | None = None,
    noise: Tensor | None = None,
    token_ids: Tensor | None = None,
    backend: str | None = None,
) -> Routing:
    """Chooses the experts of each token, and sorts the chosen rows by expert for `moe_experts`.

    Nothing waits for the GPU: the sizes of the groups stay there. The weights are differentiable in logits and noise;
    the choice is not, nor is the bias. A token with a NaN logit gets NaN weights and valid experts, and so does one
    whose softmax is over logits of -inf alone; an expert of logit -inf beside others has the weight 0.

    Args:
        logits: (tokens, experts), float32, float16 or bfloat16: the gate's output. Computed in float32.
        router: How to choose; softmax over the two largest unless given.
        bias: (experts,) for the choice alone, or None: added to the sigmoids of "sigmoid", and to the logits of
            "softmax" and "dynamic". `moe_balance_bias` keeps one that balances the experts' loads.
        noise: (tokens, experts) added to the logits, or None. Noisy top-k gating is a normal sample times
            softplus(x W_noise).
        token_ids: integers (tokens,) that "hash" routes by; the token's index unless given.
        backend: the backend to run on ("triton", "torch", ...); None picks the best one that serves the call.

    Returns:
        A `Routing`: experts, weights, positions, tokens, offsets and counts.

    Example:
        >>> import torch, flashkernel as fk
        >>> logits = torch.tensor([[1.0, 3.0, 2.0, 0.0], [0.0, 1.0, 5.0, 4.0]])
        >>> routing = fk.moe_route(logits, fk.Router("softmax", 2))
        >>> routing.experts.tolist(), routing.counts.tolist()
        ([[1, 2], [2, 3]], [0, 1, 2, 1])
        >>> torch.allclose(routing.weights.sum(1), torch.ones(2))
        True
    """
    router = Router() if router is None else router
    _check(logits, router, bias, noise, token_ids)
    return Routing(*_route(logits, bias, noise, token_ids, router, backend))


@replayed
def _route(
    logits: Tensor,
    bias: Tensor | None,
    noise: Tensor | None,
    token_ids: Tensor | None,
    router: Router,
    backend: str | None,
) -> tuple[Tensor, ...]:
    gradients = needs_gradients(logits, noise)
    chosen = choose(spec.MOE_ROUTE, backend, logits.device, logits.dtype, gradients)
    if chosen.composite:
        with without_autocast(logits):
            return tuple(chosen.run(logits, router, bias=bias, noise=noise, token_ids=token_ids))
    weights, experts, *rest = library.moe_route(logits, bias, noise, token_ids, router.text, chosen.target)
    return experts, weights, *rest


@type_checked
def moe_sort(
    experts: Tensor,
    weights: Tensor,
    *,
    num_experts: int,
    capacity: int | None = None,
    backend: str | None = None,
) -> Routing:
    """Sorts rows by expert for `moe_experts`, where something else has chosen the experts.

    Args:
        experts: integers (tokens, slots), all different for a token. Any index outside of [0, num_experts) is a slot
            that is not used.
        weights: (tokens, slots), float; differentiable. Those of slots that are not used are ignored.
        num_experts: the number of experts.
        capacity: rows that an expert takes at most; None: no limit.
        backend: the backend to run on ("triton", "torch", ...); None picks the best one that serves the call.

    Returns:
        A `Routing`.

    Example:
        >>> import torch, flashkernel as fk
        >>> routing = fk.moe_sort(torch.tensor([[1, 0], [1, 2]]), torch.rand(2, 2), num_experts=3)
        >>> routing.positions.tolist(), routing.tokens.tolist()
        ([[1, 0], [2, 3]], [0, 0, 1, 1])
    """
    if experts.ndim != 2 or experts.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"moe_sort: experts are {experts.dtype} {tuple(experts.shape)}; they must be integers (tokens, slots)"
        )
    if weights.shape != experts.shape or weights.device != experts.device or not is_float(weights):
        raise ValueError(
            f"moe_sort: weights are {weights.dtype} {tuple(weights.shape)} on {weights.device}; they must be float "
            f"{tuple(experts.shape)} on {experts.device}"
        )
    if not 1 <= num_experts <= MAX_EXPERTS or (capacity is not None and capacity < 1):
        raise ValueError(
            f"moe_sort: num_experts is {num_experts} and capacity {capacity}; there must be from 1 to {MAX_EXPERTS} "
            "experts, and a capacity of at least 1 or None"
        )
    chosen = choose(spec.MOE_SORT, backend, experts.device, weights.dtype)
    if chosen.composite:
        return chosen.run(experts, weights, num_experts=num_experts, capacity=capacity)
    kept, *rest = library.moe_sort(experts, num_experts, capacity, chosen.target)
    return Routing(kept, weights.float(), *rest)


def _check(logits: Tensor, router: Router, bias: Tensor | None, noise: Tensor | None, token_ids: Tensor | None) -> None:
    if logits.ndim != 2 or not is_float(logits):
        raise ValueError(
            f"moe_route: logits are {logits.dtype} {tuple(logits.shape)}; they must be float (tokens, experts)"
        )
    tokens, experts = logits.shape
    if not 1 <= experts <= MAX_EXPERTS:
        raise ValueError(f"moe_route: {experts} experts; there must be from 1 to {MAX_EXPERTS}")
    reason = router.declines(experts)
    if reason is not None:
        raise ValueError(f"moe_route: {reason}")
    shapes = {"bias": (bias, (experts,)), "noise": (noise, (tokens, experts)), "token_ids": (token_ids, (tokens,))}
    for name, (given, shape) in shapes.items():
        if given is None:
            continue
        floats = name != "token_ids"
        fits = is_float(given) if floats else given.dtype in (torch.int32, torch.int64)
        if tuple(given.shape) != shape or given.device != logits.device or not fits:
            raise ValueError(
                f"moe_route: {name} is {given.dtype} {tuple(given.shape)} on {given.device}; it must be "
                f"{'float' if floats else 'int32 or int64'} {shape} on {logits.device}"
            )
    if bias is not None and router.kind not in ("softmax", "sigmoid", "dynamic"):
        raise ValueError(f"moe_route: {router.kind!r} chooses without a bias; leave it out")
