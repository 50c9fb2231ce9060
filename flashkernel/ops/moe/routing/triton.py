"""Routing in Triton: from logits to experts, weights, counts, offsets and sorted rows, without a host sync.

`route_kernel` chooses experts for a block of tokens. Where one program takes all tokens it sorts the rows too: one
launch. Otherwise it stores the number of tokens that chose each expert, for each block; `scan_kernel` turns these into
offsets, and `sort_kernel` gives every slot its row. No kernel adds with atomics: the order of the rows is always the
same.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashkernel.blocks.dropout import seed_word
from flashkernel.blocks.dropout_triton import hash_elements
from flashkernel.core import device, tune
from flashkernel.core.launch import launch
from flashkernel.ops.moe.routing.configs import ROUTE, RouteConfig
from flashkernel.ops.moe.routing.expert_choice import choose_tokens
from flashkernel.ops.moe.routing.kernel_args import RouterInputs, RouterTraits, RoutingBlock, RoutingPointers
from flashkernel.ops.moe.routing.router import Router
from flashkernel.ops.moe.routing.scores_triton import (
    OUTSIDE,
    TAKEN,
    dense_weights,
    first_best,
    load_logits,
    ordered,
    probabilities,
    selected_softmax,
    sigmoid,
    taken_groups,
)


@triton.jit
def _slot(values, slot_column, slot):
    """Column `slot` of values [T, K]: [T]."""
    return tl.sum(tl.where((slot_column == slot)[None, :], values, 0), 1)


@triton.jit
def _at_expert(values, column, expert):
    """values[t, expert[t]] of values [T, E]: [T]; 0 where the expert is -1."""
    return tl.sum(tl.where(column[None, :] == expert[:, None], values, 0), 1)


@triton.jit
def _selected(chosen, column, slot_column, K: tl.constexpr):
    """Which experts [T, E] are among chosen [T, K]."""
    found = tl.zeros([chosen.shape[0], column.shape[0]], tl.int1)
    for slot in tl.range(0, K):
        found |= column[None, :] == _slot(chosen, slot_column, slot)[:, None]
    return found


@triton.jit
def _clear_rows(tokens_of_rows, first, last, used, BLOCK: tl.constexpr):
    """Writes 0 to the rows from `first` to `last` behind the `used` ones."""
    for start in tl.range(first, last, BLOCK):
        row = start + tl.arange(0, BLOCK)
        tl.store(tokens_of_rows + row, tl.zeros([BLOCK], tl.int32), mask=(row < last) & (row >= used))


@triton.jit
def _store_positions(
    chosen, selected, starts, routing, token, in_tokens, column, slot_column, capacity, K: tl.constexpr
):
    """Gives each slot its row: the expert's first row of this block, plus the slot's rank within the block.

    starts [E] are row numbers, and capacity [E] the row behind the last that each expert may have.
    """
    count = selected.to(tl.int32)
    row = starts[None, :] + tl.cumsum(count, 0) - count
    row = tl.where(selected & (row < capacity[None, :]), row, -1)
    for slot in tl.range(0, K):
        expert = _slot(chosen, slot_column, slot)
        position = tl.where(expert < 0, -1, _at_expert(row, column, expert))
        tl.store(routing.positions + token.to(tl.int64) * K + slot, position, mask=in_tokens)
        tl.store(routing.tokens + position, token, mask=in_tokens & (position >= 0))


@triton.jit
def _store_offsets(offsets, counts, total, column, experts, capacity):
    """Stores the counts [E] and the offsets of experts that take `capacity` rows at most; returns the first rows."""
    in_experts = column < experts
    kept = tl.minimum(total, capacity)
    ends = tl.cumsum(kept, 0)
    tl.store(counts + column, total, mask=in_experts)
    tl.store(offsets + 1 + column, ends, mask=in_experts)
    tl.store(offsets + column, ends - kept, mask=column < 1)
    return ends - kept, ends


@triton.jit
def route_kernel(
    inputs, routing, block_counts, logit_strides, noise_strides, bias_stride, tokens, experts, capacity, mass, scale,
    word, ROUTER: tl.constexpr, BLOCK: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """Experts and weights of a block of tokens. ALONE: this is the only program, and stores offsets and rows too.

    `inputs` and `routing` are RouterInputs and RoutingPointers; ROUTER and BLOCK are RouterTraits and RoutingBlock.
    """
    KIND: tl.constexpr = ROUTER.KIND
    K: tl.constexpr = ROUTER.K
    GROUPS: tl.constexpr = ROUTER.GROUPS
    TOKENS: tl.constexpr = BLOCK.TOKENS
    EXPERTS: tl.constexpr = BLOCK.EXPERTS
    SLOTS: tl.constexpr = BLOCK.SLOTS
    token, column = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, EXPERTS)
    slot_column = tl.arange(0, SLOTS)
    in_tokens, in_experts = token < tokens, column < experts
    inside = in_tokens[:, None] & in_experts[None, :]
    value = load_logits(inputs.logits, inputs.noise, token, column, inside, logit_strides, noise_strides)
    if KIND == "random" or KIND == "hash":
        number = token if inputs.token_ids is None else tl.load(inputs.token_ids + token, mask=in_tokens, other=0)
        index = number.to(tl.int64)[:, None] * experts + column[None, :]
        key = (hash_elements(tl.cast(word, tl.uint32), index) ^ 0x80000000).to(tl.int32, bitcast=True)
        key = tl.maximum(key, OUTSIDE + 1)
    else:
        score = value
        if KIND == "sigmoid":
            score = sigmoid(value)
        if inputs.bias is not None:
            bias = tl.load(inputs.bias + column * bias_stride, mask=in_experts, other=0.0).to(tl.float32)
            score += bias[None, :]
        score = tl.where(inside & (score == score), score, float("-inf"))
        key = ordered(score)
        if GROUPS > 1:
            taken = taken_groups(score, column, experts // GROUPS, GROUPS, ROUTER.TOP_GROUPS, ROUTER.BEST_TWO)
            key = tl.where(taken, key, OUTSIDE)
    key = tl.where(in_experts[None, :], key, TAKEN)
    p = value
    if KIND == "dynamic":
        p = probabilities(value, inside)
    before = tl.zeros([TOKENS], tl.float32)
    chosen = tl.full([TOKENS, SLOTS], -1, tl.int32)
    selected = tl.zeros([TOKENS, EXPERTS], tl.int1)
    for slot in tl.range(0, K):
        best = first_best(key, column)
        hit = column[None, :] == best[:, None]
        key = tl.where(hit, TAKEN, key)
        used = in_tokens
        if KIND == "dynamic":
            used = in_tokens & ((before < mass) | (mass >= 1.0) | (slot < ROUTER.MIN_K))
            before += tl.sum(tl.where(hit, p, 0.0), 1)
        selected |= hit & used[:, None]
        chosen = tl.where((slot_column == slot)[None, :], tl.where(used, best, -1)[:, None], chosen)
    offset = token.to(tl.int64)[:, None] * K + slot_column[None, :]
    tl.store(routing.experts + offset, chosen, mask=in_tokens[:, None] & (slot_column < K)[None, :])
    weight = dense_weights(value, selected, inside, scale, KIND, ROUTER.NORMALIZE)
    for slot in tl.range(0, K):
        picked = _at_expert(weight, column, _slot(chosen, slot_column, slot))
        tl.store(routing.weights + token.to(tl.int64) * K + slot, picked, mask=in_tokens)
    total = tl.sum(selected.to(tl.int32), 0)
    if ALONE:
        starts, ends = _store_offsets(routing.offsets, routing.counts, total, column, experts, capacity)
        _store_positions(chosen, selected, starts, routing, token, in_tokens, column, slot_column, ends, K)
        if KIND == "dynamic" or capacity < tokens:
            _clear_rows(routing.tokens, 0, tokens * K, tl.max(ends, 0), 1024)
    else:
        tl.store(block_counts + tl.program_id(0) * experts + column, total, mask=in_experts)


@triton.jit
def scan_kernel(
    block_counts, block_starts, offsets, counts, blocks, experts, capacity, CHUNK: tl.constexpr, EXPERTS: tl.constexpr
):
    """One program: from the counts of all blocks [blocks, experts] to counts, offsets and each block's first rows."""
    column = tl.arange(0, EXPERTS)
    in_experts = column < experts
    total = tl.zeros([EXPERTS], tl.int32)
    for first in tl.range(0, blocks, CHUNK):
        block = first + tl.arange(0, CHUNK)
        offset = block[:, None] * experts + column[None, :]
        inside = (block < blocks)[:, None] & in_experts[None, :]
        count = tl.load(block_counts + offset, mask=inside, other=0)
        tl.store(block_starts + offset, total[None, :] + tl.cumsum(count, 0) - count, mask=inside)
        total += tl.sum(count, 0)
    _store_offsets(offsets, counts, total, column, experts, capacity)


@triton.jit
def count_kernel(
    given, routing, block_counts, given_strides, tokens, experts, capacity,
    K: tl.constexpr, BLOCK: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """As `route_kernel`, where the experts are given; an index outside of them is a slot that is not used."""
    TOKENS: tl.constexpr = BLOCK.TOKENS
    EXPERTS: tl.constexpr = BLOCK.EXPERTS
    SLOTS: tl.constexpr = BLOCK.SLOTS
    token, column = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, EXPERTS)
    slot_column = tl.arange(0, SLOTS)
    in_tokens = token < tokens
    inside = in_tokens[:, None] & (slot_column < K)[None, :]
    wide = token.to(tl.int64)[:, None]
    chosen = tl.load(given + wide * given_strides[0] + slot_column[None, :] * given_strides[1], mask=inside, other=-1)
    chosen = tl.where((chosen >= 0) & (chosen < experts), chosen, -1).to(tl.int32)
    tl.store(routing.experts + wide * K + slot_column[None, :], chosen, mask=inside)
    selected = _selected(chosen, column, slot_column, K)
    total = tl.sum(selected.to(tl.int32), 0)
    if ALONE:
        starts, ends = _store_offsets(routing.offsets, routing.counts, total, column, experts, capacity)
        _store_positions(chosen, selected, starts, routing, token, in_tokens, column, slot_column, ends, K)
        _clear_rows(routing.tokens, 0, tokens * K, tl.max(ends, 0), 1024)
    else:
        tl.store(block_counts + tl.program_id(0) * experts + column, total, mask=column < experts)


@triton.jit
def sort_kernel(routing, block_starts, tokens, experts, K: tl.constexpr, BLOCK: tl.constexpr, SPARSE: tl.constexpr):
    """Rows of a block of tokens. SPARSE: some slots have no row, so that rows behind the last used one are cleared."""
    TOKENS: tl.constexpr = BLOCK.TOKENS
    EXPERTS: tl.constexpr = BLOCK.EXPERTS
    SLOTS: tl.constexpr = BLOCK.SLOTS
    token, column = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, EXPERTS)
    slot_column = tl.arange(0, SLOTS)
    in_tokens, in_experts = token < tokens, column < experts
    offset = token.to(tl.int64)[:, None] * K + slot_column[None, :]
    chosen = tl.load(routing.experts + offset, mask=in_tokens[:, None] & (slot_column < K)[None, :], other=-1)
    selected = _selected(chosen, column, slot_column, K)
    starts = tl.load(routing.offsets + column, mask=in_experts, other=0)
    ends = tl.load(routing.offsets + 1 + column, mask=in_experts, other=0)
    starts += tl.load(block_starts + tl.program_id(0) * experts + column, mask=in_experts, other=0)
    _store_positions(chosen, selected, starts, routing, token, in_tokens, column, slot_column, ends, K)
    if SPARSE:
        first = tl.program_id(0) * TOKENS * K
        last = tl.minimum(first + TOKENS * K, tokens * K)
        _clear_rows(routing.tokens, first, last, tl.load(routing.offsets + experts), 1024)


@triton.jit
def route_gradient_kernel(
    dweights, logits, noise, chosen_experts, dlogits, logit_strides, noise_strides, dweight_strides, tokens, experts,
    scale, KIND: tl.constexpr, NORMALIZE: tl.constexpr, K: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """dlogits [tokens, experts] of the weights' gradient; the choice itself has none."""
    token, column = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, EXPERTS)
    in_tokens = token < tokens
    inside = in_tokens[:, None] & (column < experts)[None, :]
    value = load_logits(logits, noise, token, column, inside, logit_strides, noise_strides)
    gradient = tl.zeros([TOKENS, EXPERTS], tl.float32)
    selected = tl.zeros([TOKENS, EXPERTS], tl.int1)
    wide = token.to(tl.int64)
    if KIND == "expert_choice":  # a slot for each expert
        selected = tl.load(chosen_experts + wide[:, None] * K + column[None, :], mask=inside, other=-1) >= 0
        there = dweights + wide[:, None] * dweight_strides[0] + column[None, :] * dweight_strides[1]
        gradient = tl.load(there, mask=inside & selected, other=0.0).to(tl.float32)
    else:
        for slot in tl.range(0, K):
            expert = tl.load(chosen_experts + wide * K + slot, mask=in_tokens, other=-1)
            there = dweights + wide * dweight_strides[0] + slot * dweight_strides[1]
            given = tl.load(there, mask=in_tokens & (expert >= 0), other=0.0).to(tl.float32)
            hit = column[None, :] == expert[:, None]
            selected |= hit
            gradient += tl.where(hit, given[:, None], 0.0)
    if KIND == "sigmoid":
        s = sigmoid(value)
        derivative = s * (1.0 - s)
        if NORMALIZE:
            total = tl.sum(tl.where(selected, s, 0.0), 1)[:, None] + 1e-20
            mean = tl.sum(tl.where(selected, s, 0.0) * gradient, 1)[:, None] / total
            gradient = (gradient - mean) / total
        result = tl.where(selected, gradient * derivative, 0.0)
    else:
        if NORMALIZE:
            weight = selected_softmax(value, selected)
        else:
            weight = probabilities(value, inside)
        result = weight * (gradient - tl.sum(weight * gradient, 1)[:, None])
    offset = wide[:, None] * experts + column[None, :]
    tl.store(dlogits + offset, (result * scale).to(dlogits.dtype.element_ty), mask=inside)


def route(
    logits: Tensor, bias: Tensor | None, noise: Tensor | None, token_ids: Tensor | None, router: Router
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The fields of a `Routing`; `RouteKernels.route` documents the arguments."""
    tokens, experts = logits.shape
    slots = router.slots(experts)
    integers: dict[str, Any] = {"dtype": torch.int32, "device": logits.device}
    chosen, positions = torch.empty((tokens, slots), **integers), torch.empty((tokens, slots), **integers)
    weights = torch.empty((tokens, slots), dtype=torch.float32, device=logits.device)
    rows = torch.empty(router.rows(tokens, experts), **integers)
    made = torch.zeros if tokens == 0 else torch.empty
    offsets, counts = made(experts + 1, **integers), made(experts, **integers)
    results = (chosen, weights, positions, rows, offsets, counts)
    if tokens == 0:
        return results
    config = tune.pick(ROUTE, device.properties(logits.device), {"tokens": tokens, "experts": experts})
    blocks = tune.ceil_div(tokens, config.tokens)
    strides = (logits.stride(), (0, 0) if noise is None else noise.stride())
    if router.kind == "expert_choice":
        choose_tokens(logits, noise, router, results, config)
        return results
    limit = router.limit(tokens, experts)
    capacity = tokens if limit is None else min(tokens, limit)
    block_counts = None if blocks == 1 else torch.empty((blocks, experts), **integers)
    routing = RoutingPointers(*results)
    traits = RouterTraits(
        router.kind, router.normalize, slots, router.min_k, router.groups, router.top_groups,
        router.kind == "sigmoid" and experts > router.groups,
    )  # fmt: skip
    launch(
        route_kernel, (blocks,), RouterInputs(logits, bias, noise, token_ids), routing, block_counts, *strides,
        0 if bias is None else bias.stride(0), tokens, experts, capacity, float(router.mass), float(router.scale),
        seed_word(router.seed), ROUTER=traits, BLOCK=_block(config, experts, slots), ALONE=block_counts is None,
        num_warps=config.num_warps,
    )  # fmt: skip
    if block_counts is not None:
        sparse = router.kind == "dynamic" or capacity < tokens
        _sort_blocks(block_counts, routing, capacity, sparse, config)
    return results


def _block(config: RouteConfig, experts: int, slots: int) -> RoutingBlock:
    return RoutingBlock(config.tokens, tune.power_of_2(experts), tune.power_of_2(slots))


def _sort_blocks(
    block_counts: Tensor, routing: RoutingPointers, capacity: int, sparse: bool, config: RouteConfig
) -> None:
    """From the counts of blocks of tokens to offsets, and to the row of every slot."""
    blocks, experts = block_counts.shape
    tokens, slots = routing.experts.shape
    block = _block(config, experts, slots)
    block_starts = torch.empty_like(block_counts)
    launch(
        scan_kernel, (1,), block_counts, block_starts, routing.offsets, routing.counts, blocks, experts, capacity,
        CHUNK=max(1, min(tune.power_of_2(blocks), 8192 // block.EXPERTS)), EXPERTS=block.EXPERTS, num_warps=8,
    )  # fmt: skip
    launch(
        sort_kernel, (blocks,), routing._replace(weights=None, counts=None), block_starts, tokens, experts, K=slots,
        BLOCK=block, SPARSE=sparse, num_warps=config.num_warps,
    )  # fmt: skip


def sort(
    given: Tensor, experts: int, capacity: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(experts, positions, tokens, offsets, counts); `SortKernels.sort` documents the arguments."""
    tokens, slots = given.shape
    integers: dict[str, Any] = {"dtype": torch.int32, "device": given.device}
    chosen, positions = torch.empty((tokens, slots), **integers), torch.empty((tokens, slots), **integers)
    made = torch.empty if given.numel() else torch.zeros
    rows, offsets, counts = (
        torch.empty(tokens * slots, **integers),
        made(experts + 1, **integers),
        made(experts, **integers),
    )
    if given.numel() == 0:
        return chosen, positions, rows, offsets, counts
    config = tune.pick(ROUTE, device.properties(given.device), {"tokens": tokens, "experts": experts})
    blocks, limit = tune.ceil_div(tokens, config.tokens), tokens if capacity is None else min(tokens, capacity)
    block_counts = None if blocks == 1 else torch.empty((blocks, experts), **integers)
    routing = RoutingPointers(chosen, None, positions, rows, offsets, counts)
    launch(
        count_kernel, (blocks,), given, routing, block_counts, given.stride(), tokens, experts, limit,
        K=slots, BLOCK=_block(config, experts, slots), ALONE=block_counts is None, num_warps=config.num_warps,
    )  # fmt: skip
    if block_counts is not None:
        _sort_blocks(block_counts, routing, limit, True, config)
    return chosen, positions, rows, offsets, counts


def route_backward(dweights: Tensor, logits: Tensor, noise: Tensor | None, chosen: Tensor, router: Router) -> Tensor:
    """dlogits; `RouteKernels.route_backward` documents the arguments."""
    tokens, experts = logits.shape
    dlogits = torch.empty((tokens, experts), dtype=logits.dtype, device=logits.device)
    if dlogits.numel() == 0:
        return dlogits
    config = tune.pick(ROUTE, device.properties(logits.device), {"tokens": tokens, "experts": experts})
    launch(
        route_gradient_kernel, (tune.ceil_div(tokens, config.tokens),), dweights, logits, noise, chosen, dlogits,
        logits.stride(), (0, 0) if noise is None else noise.stride(), dweights.stride(), tokens, experts,
        float(router.scale), KIND=router.kind, NORMALIZE=router.normalize, K=chosen.shape[1], TOKENS=config.tokens,
        EXPERTS=tune.power_of_2(experts), num_warps=config.num_warps,
    )  # fmt: skip
    return dlogits
