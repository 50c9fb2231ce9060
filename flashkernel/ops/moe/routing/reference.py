"""Routing in plain torch: the ground truth, in whatever precision it is given. No value is read on the host."""

from __future__ import annotations

import torch
from torch import Tensor

from flashkernel.blocks.dropout import hash_elements
from flashkernel.ops.moe.routing.router import Router, Routing


def moe_route(
    logits: Tensor,
    router: Router,
    bias: Tensor | None = None,
    noise: Tensor | None = None,
    token_ids: Tensor | None = None,
) -> Routing:
    """Experts, weights and sorted rows; `Routing` documents them. A token with a NaN logit gets NaN weights."""
    logits = logits if noise is None else logits + noise
    count = logits.shape[1]
    if router.kind == "expert_choice":
        selected, positions, tokens, offsets, counts = _chosen_by_experts(logits.detach(), router)
        weights = weights_of(logits, selected, router)
        experts = torch.where(selected, torch.arange(count, device=logits.device), -1)
        return Routing(experts.int(), wide(weights), positions, tokens, offsets, counts)
    keys = selection_keys(logits.detach(), router, bias, token_ids)
    order = keys.sort(dim=1, descending=True, stable=True).indices[:, : router.k]  # of equal ones the first expert
    used = torch.ones_like(order, dtype=torch.bool)
    if router.kind == "dynamic":
        probability = torch.softmax(logits.detach(), 1).gather(1, order)
        before = probability.cumsum(1) - probability
        used = (torch.arange(router.k, device=logits.device) < router.min_k) | (before < router.mass)
        used = torch.ones_like(used) if router.mass >= 1 else used  # a rounded sum reaches 1 early
    selected = torch.zeros_like(keys, dtype=torch.bool).scatter(1, order, used)
    weights = torch.where(used, weights_of(logits, selected, router).gather(1, order), 0)
    experts = torch.where(used, order, -1).int()
    return Routing(experts, wide(weights), *sort_rows(experts, count, router.limit(logits.shape[0], count)))


def moe_sort(experts: Tensor, weights: Tensor, *, num_experts: int, capacity: int | None = None) -> Routing:
    """The routing of given experts and weights; an index outside of the experts is a slot that is not used."""
    chosen = torch.where((experts >= 0) & (experts < num_experts), experts, -1).int()
    return Routing(chosen, wide(weights), *sort_rows(chosen, num_experts, capacity))


def wide(weights: Tensor) -> Tensor:
    """Weights in float32, or in float64 where they are."""
    return weights.to(torch.promote_types(weights.dtype, torch.float32))


def selection_keys(logits: Tensor, router: Router, bias: Tensor | None, token_ids: Tensor | None) -> Tensor:
    """[tokens, experts]: what the choice goes by; -inf for NaN and for experts of groups that are not taken."""
    tokens, experts = logits.shape
    if router.kind in ("random", "hash"):
        row = torch.arange(tokens, device=logits.device) if token_ids is None else token_ids
        index = row.long()[:, None] * experts + torch.arange(experts, device=logits.device)
        return hash_elements(router.seed, index)
    keys = torch.sigmoid(logits) if router.kind == "sigmoid" else logits
    keys = keys if bias is None else keys + bias
    keys = torch.where(keys.isnan(), -torch.inf, keys)
    if router.groups == 1 or experts == 0:
        return keys
    by_group = keys.unflatten(1, (router.groups, experts // router.groups))
    best = min(2 if router.kind == "sigmoid" else 1, by_group.shape[2])
    quality = by_group.topk(best, dim=2).values.sum(2)  # [tokens, groups]
    groups = quality.sort(dim=1, descending=True, stable=True).indices[:, : router.top_groups]
    taken = torch.zeros_like(quality, dtype=torch.bool).scatter(1, groups, True)
    # Below -inf there is nothing: experts of other groups come after the NaN ones of these by their order.
    lowest = torch.finfo(keys.dtype).min
    inside = torch.where(by_group == -torch.inf, lowest, by_group)
    return torch.where(taken[:, :, None], inside, -torch.inf).flatten(1)


def weights_of(logits: Tensor, selected: Tensor, router: Router) -> Tensor:
    """[tokens, experts]: the weights of the selected experts, 0 elsewhere."""
    if router.kind == "sigmoid":
        weights = torch.where(selected, torch.sigmoid(logits), 0)
        if router.normalize:
            weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    elif router.normalize:
        some = selected.any(1, keepdim=True)  # no expert took the token: all would be exp(-inf) / 0
        weights = torch.softmax(torch.where(selected | ~some, logits, -torch.inf), 1)
        weights = torch.where(selected, weights, 0)
    else:
        weights = torch.where(selected, torch.softmax(logits, 1), 0)
    broken = logits.detach().isnan().any(1, keepdim=True)
    return torch.where(broken & selected, torch.nan, weights * router.scale)


def sort_rows(experts: Tensor, count: int, capacity: int | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(positions, tokens, offsets, counts) of chosen experts [tokens, slots], -1 where a slot is not used."""
    flat = torch.where(experts < 0, count, experts).flatten().long()
    slots, device = flat.shape[0], flat.device
    counts = torch.zeros(count + 1, dtype=torch.int64, device=device).scatter_add(0, flat, torch.ones_like(flat))
    starts = counts.cumsum(0) - counts
    order = flat.sort(stable=True).indices
    rank = torch.empty_like(flat).scatter(0, order, torch.arange(slots, device=device)) - starts[flat]
    kept = counts[:count] if capacity is None else counts[:count].clamp(max=capacity)
    offsets = torch.nn.functional.pad(kept.cumsum(0), (1, 0))
    used = flat < count if capacity is None else (flat < count) & (rank < capacity)
    positions = torch.where(used, offsets[flat] + rank, -1)
    token = torch.arange(slots, device=device) // max(1, experts.shape[1])
    # Slots without a row write to one row more, which is cut off.
    tokens = torch.zeros(slots + 1, dtype=torch.int64, device=device)
    tokens = tokens.scatter(0, torch.where(used, positions, slots), token)[:slots]
    return positions.view(experts.shape).int(), tokens.int(), offsets.int(), counts[:count].int()


def _chosen_by_experts(logits: Tensor, router: Router) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(selected, positions, tokens, offsets, counts): each expert takes the tokens with the largest probabilities."""
    count, experts = logits.shape
    capacity = router.choice_capacity(count, experts)
    keys = torch.softmax(logits, 1).t()  # [experts, tokens]
    keys = torch.where(keys.isnan(), -1, keys)
    order = keys.sort(dim=1, descending=True, stable=True).indices[:, :capacity]
    tokens = order.sort(dim=1).values  # [experts, capacity], in the order of the batch
    row = torch.arange(experts * capacity, device=logits.device).view(experts, capacity)
    positions = torch.full((experts, count), -1, device=logits.device).scatter(1, tokens, row).t()
    offsets = torch.arange(experts + 1, device=logits.device) * capacity
    counts = torch.full((experts,), capacity, device=logits.device)
    return positions >= 0, positions.int().contiguous(), tokens.flatten().int(), offsets.int(), counts.int()
