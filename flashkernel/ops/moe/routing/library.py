"""The routing kernels as torch operators, with their gradient."""

import torch
from torch import Tensor

from flashkernel.core.arguments import near
from flashkernel.core.library import Gradient, KernelOp
from flashkernel.core.op import resolve
from flashkernel.ops.moe.routing.router import Router


def _forward(
    logits: Tensor, bias: Tensor | None, noise: Tensor | None, token_ids: Tensor | None, router: str, kernels: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(weights, experts, positions, tokens, offsets, counts): the output with a gradient comes first."""
    ids = None if token_ids is None else token_ids.contiguous()
    bias, noise = (None if one is None else near(one) for one in (bias, noise))
    experts, weights, *rest = resolve(kernels).route(near(logits), bias, noise, ids, Router.parse(router))
    return weights, experts, *rest


def _fake_forward(logits, bias, noise, token_ids, router, kernels):
    tokens, experts = logits.shape
    slots, rows = Router.parse(router).slots(experts), Router.parse(router).rows(tokens, experts)
    sizes = ((tokens, slots), (tokens, slots), (tokens, slots), (rows,), (experts + 1,), (experts,))
    return tuple(
        logits.new_empty(size, dtype=torch.float32 if index == 0 else torch.int32) for index, size in enumerate(sizes)
    )


def _backward(
    dweights: Tensor, logits: Tensor, noise: Tensor | None, chosen: Tensor, router: str, kernels: str
) -> Tensor:
    noise = None if noise is None else near(noise)
    return resolve(kernels).route_backward(near(dweights), near(logits), noise, chosen, Router.parse(router))


def _fake_backward(dweights, logits, noise, chosen, router, kernels):
    return logits.new_empty(logits.shape)


def _setup_context(ctx, inputs, output):
    logits, _, noise, _, ctx.router, ctx.kernels = inputs
    _, chosen, *rest = output
    ctx.mark_non_differentiable(chosen, *rest)
    ctx.save_for_backward(logits, noise, chosen)


def _pull_back(ctx, wanted, dweights, *rest):
    logits, noise, chosen = ctx.saved_tensors
    dlogits = moe_route_backward(dweights, logits, noise, chosen, ctx.router, ctx.kernels)
    return dlogits, dlogits.to(noise.dtype) if wanted[1] else None


def _sort(
    given: Tensor, experts: int, capacity: int | None, kernels: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return resolve(kernels).sort(near(given), experts, capacity)


def _fake_sort(given, experts, capacity, kernels):
    sizes = (given.shape, given.shape, (given.numel(),), (experts + 1,), (experts,))
    return tuple(given.new_empty(size, dtype=torch.int32) for size in sizes)


moe_sort = KernelOp("moe_sort", _sort, _fake_sort)
moe_route_backward = KernelOp("moe_route_backward", _backward, _fake_backward)
moe_route = KernelOp("moe_route", _forward, _fake_forward, Gradient(_setup_context, _pull_back, ("logits", "noise")))
