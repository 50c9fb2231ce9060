"""Expert choice in Triton: each expert takes the tokens with the largest probabilities for it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashkernel.core import tune
from flashkernel.core.launch import launch
from flashkernel.ops.moe.routing.configs import RouteConfig
from flashkernel.ops.moe.routing.router import Router
from flashkernel.ops.moe.routing.scores_triton import dense_weights, load_logits, probabilities

_MAX_TOKENS = 16384  # tokens that `choose_tokens_kernel` holds at a time


@triton.jit
def token_keys_kernel(
    logits, noise, keys, logit_strides, noise_strides, tokens, experts, TOKENS: tl.constexpr, EXPERTS: tl.constexpr
):
    """keys [experts, tokens]: integers in the order of the probabilities, at least 1; 0 for NaN."""
    token, column = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, EXPERTS)
    inside = (token < tokens)[:, None] & (column < experts)[None, :]
    p = probabilities(load_logits(logits, noise, token, column, inside, logit_strides, noise_strides), inside)
    key = tl.where(p == p, p.to(tl.int32, bitcast=True) + 1, 0)
    tl.store(keys + column.to(tl.int64)[None, :] * tokens + token[:, None], key, mask=inside)


@triton.jit
def choose_tokens_kernel(
    keys, chosen_experts, positions, tokens_of_rows, offsets, counts, tokens, experts, capacity, BLOCK: tl.constexpr
):
    """An expert takes the `capacity` tokens with the largest keys; of equal ones the first.

    The key of the last one is found bit by bit: the largest threshold that `capacity` keys reach.
    """
    expert = tl.program_id(0)
    mine = keys + expert.to(tl.int64) * tokens
    threshold = 0
    for step in tl.range(0, 31):
        candidate = threshold | (1 << (30 - step))
        reached = 0
        for first in tl.range(0, tokens, BLOCK):
            token = first + tl.arange(0, BLOCK)
            key = tl.load(mine + token, mask=token < tokens, other=-1)
            reached += tl.sum((key >= candidate).to(tl.int32), 0)
        threshold = tl.where(reached >= capacity, candidate, threshold)
    above = 0
    for first in tl.range(0, tokens, BLOCK):
        token = first + tl.arange(0, BLOCK)
        above += tl.sum((tl.load(mine + token, mask=token < tokens, other=-1) > threshold).to(tl.int32), 0)
    row, ties = expert * capacity, capacity - above  # ties: how many with exactly this key are taken
    for first in tl.range(0, tokens, BLOCK):
        token = first + tl.arange(0, BLOCK)
        inside = token < tokens
        key = tl.load(mine + token, mask=inside, other=-1)
        equal = (key == threshold).to(tl.int32)
        taken = (key > threshold) | ((equal > 0) & (tl.cumsum(equal, 0) - equal < ties))
        count = taken.to(tl.int32)
        position = tl.where(taken, row + tl.cumsum(count, 0) - count, -1)
        offset = token.to(tl.int64) * experts + expert
        tl.store(chosen_experts + offset, tl.where(taken, expert, -1), mask=inside)
        tl.store(positions + offset, position, mask=inside)
        tl.store(tokens_of_rows + position, token, mask=taken)
        row += tl.sum(count, 0)
        ties -= tl.minimum(ties, tl.sum(equal, 0))
    tl.store(counts + expert, capacity)
    tl.store(offsets + expert + 1, (expert + 1) * capacity)
    if expert == 0:
        tl.store(offsets, 0)


@triton.jit
def chosen_weights_kernel(
    logits, noise, chosen_experts, weights, logit_strides, noise_strides, tokens, experts, scale,
    NORMALIZE: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Weights [tokens, experts] of tokens that experts chose."""
    token, column = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, EXPERTS)
    inside = (token < tokens)[:, None] & (column < experts)[None, :]
    value = load_logits(logits, noise, token, column, inside, logit_strides, noise_strides)
    offset = token.to(tl.int64)[:, None] * experts + column[None, :]
    selected = tl.load(chosen_experts + offset, mask=inside, other=-1) >= 0
    weight = dense_weights(value, selected, inside, scale, "softmax", NORMALIZE)
    tl.store(weights + offset, weight, mask=inside)


def choose_tokens(
    logits: Tensor, noise: Tensor | None, router: Router, results: tuple[Tensor, ...], config: RouteConfig
) -> None:
    """Fills the fields of a `Routing`."""
    tokens, experts = logits.shape
    chosen, weights, positions, rows, offsets, counts = results
    blocks = tune.ceil_div(tokens, config.tokens)
    strides = (logits.stride(), (0, 0) if noise is None else noise.stride())
    keys = torch.empty((experts, tokens), dtype=torch.int32, device=logits.device)
    tile = {"TOKENS": config.tokens, "EXPERTS": tune.power_of_2(experts), "num_warps": config.num_warps}
    launch(token_keys_kernel, (blocks,), logits, noise, keys, *strides, tokens, experts, **tile)
    block = min(_MAX_TOKENS, tune.power_of_2(tokens))
    launch(
        choose_tokens_kernel, (experts,), keys, chosen, positions, rows, offsets, counts, tokens, experts,
        router.choice_capacity(tokens, experts), BLOCK=block, num_warps=max(4, min(16, block // 512)),
    )  # fmt: skip
    launch(
        chosen_weights_kernel, (blocks,), logits, noise, chosen, weights, *strides, tokens, experts,
        float(router.scale), NORMALIZE=router.normalize, **tile,
    )  # fmt: skip
