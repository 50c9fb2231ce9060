"""The definition of `sample` in plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashkernel.ops.sampling.params import IN_PROMPT, INVALID, LOWEST, SampleParams, States, from_keywords

_WORD = 0xFFFFFFFF
_ROUNDS, _MULTIPLIERS, _WEYL = 10, (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)


def philox(seeds: Tensor, positions: Tensor) -> Tensor:
    """First word of Philox4x32-10 with the seed as key and the position as counter: int64 in [0, 2^32)."""
    keys = [seeds & _WORD, (seeds >> 32) & _WORD]
    zero = torch.zeros_like(seeds)
    counter = [positions & _WORD, (positions >> 32) & _WORD, zero, zero]
    for _ in range(_ROUNDS):
        (high_0, low_0), (high_1, low_1) = (_multiply(counter[i], by) for i, by in zip((0, 2), _MULTIPLIERS))
        counter = [high_1 ^ counter[1] ^ keys[0], low_1, high_0 ^ counter[3] ^ keys[1], low_0]
        keys = [(key + step) & _WORD for key, step in zip(keys, _WEYL)]
    return counter[0]


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """(high, low) words of a product of two 32-bit words."""
    product = a * b  # wraps in 64 bits, which keeps every bit
    return (product >> 32) & _WORD, product & _WORD


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """float64 in [0, 1): 24 bits for each (seed, position)."""
    return (philox(seeds, positions) >> 8).double() * 2.0**-24


def adjusted(logits: Tensor, params: SampleParams, states: States) -> Tensor:
    """Logits with penalties, biases and the mask of allowed tokens."""
    rows = torch.arange(logits.shape[0], device=logits.device) if states.rows is None else states.rows
    if states.token_counts is not None and params.penalties is not None:
        counts = states.token_counts[rows]
        output = counts & (IN_PROMPT - 1)
        repetition, presence, frequency = (column[:, None].to(logits.dtype) for column in params.penalties.unbind(1))
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(counts != 0, repeated, logits)
        logits = logits - frequency * output - presence * (output > 0)
    if states.bias_ids is not None:
        assert states.bias_values is not None
        ids, values = states.bias_ids[rows].long(), states.bias_values[rows].to(logits.dtype)
        applies = ((ids < 0).cumsum(1) == 0) & (ids < logits.shape[1])  # entries end at the first -1
        if states.bias_until is not None:
            applies &= params.positions[:, None] < states.bias_until[rows]
        slots = torch.where(applies, ids, logits.shape[1])
        padded = torch.zeros(logits.shape[0], logits.shape[1] + 1, dtype=logits.dtype, device=logits.device)
        padded.scatter_add_(1, slots, torch.where(applies, values, 0.0))
        logits = logits + padded[:, :-1]
    if states.allowed is not None:
        index = torch.arange(logits.shape[1], device=logits.device)
        words = states.allowed[rows][:, index // 32]
        forbidden = ((words >> (index % 32).to(words.dtype)) & 1) == 0
        if states.restricted is not None:
            forbidden &= states.restricted[rows, None] != 0
        logits = logits.masked_fill(forbidden, -torch.inf)
    return logits


def kept(logits: Tensor, params: SampleParams) -> Tensor:
    """Tokens that top-k, top-p and min-p keep, in this order; equal logits stay or go together, and the largest ones
    stay whatever is asked for. Bool, as logits."""
    temperature = _column(params.temperature, logits, 1.0)
    largest = logits.amax(-1, keepdim=True)
    scaled = (logits - largest) / torch.where(temperature > 0, temperature, 1.0)
    values, order = torch.sort(scaled, dim=-1, descending=True, stable=True)
    negated = (-values).contiguous()
    first = torch.searchsorted(negated, negated)  # where the run of equal values begins
    keep = torch.isfinite(values)
    if params.top_k is not None:
        top_k = params.top_k[:, None]
        keep &= (first < top_k) | (top_k <= 0)
    probs = torch.where(keep, values.exp(), 0.0)
    if params.top_p is not None:
        top_p = params.top_p[:, None].to(logits.dtype)
        before = (probs.cumsum(-1) - probs).gather(1, first)  # sum over all larger values
        keep &= (before < top_p * probs.sum(-1, keepdim=True)) | (top_p >= 1)
    if params.min_p is not None:
        keep &= values >= params.min_p[:, None].to(logits.dtype).log()
    keep |= (first == 0) & torch.isfinite(values)
    return torch.zeros_like(keep).scatter_(1, order, keep)


def _column(values: Tensor | None, like: Tensor, default: float) -> Tensor:
    if values is None:
        return torch.full((like.shape[0], 1), default, dtype=like.dtype, device=like.device)
    return values[:, None].to(like.dtype)


def sample(logits: Tensor, seeds: Tensor, positions: Tensor, **given: Any) -> Tensor:
    """The first token whose cumulative probability, in the vocabulary's order, exceeds uniform * total."""
    params, states = from_keywords(seeds, positions, given)
    logits = adjusted(logits.to(torch.promote_types(logits.dtype, torch.float32)), params, states)
    logits = torch.where(logits > LOWEST, logits, torch.where(logits.isnan(), logits, -torch.inf))
    largest, greedy = logits.max(-1)
    valid = torch.isfinite(largest)
    logits = torch.where(valid[:, None], logits, 0.0)
    scale = _column(params.temperature, logits, 1.0)
    probs = torch.softmax(logits / torch.where(scale > 0, scale, 1.0), -1) * kept(logits, params)
    cdf = probs.cumsum(-1)
    total = cdf[:, -1:]
    target = torch.minimum(uniform(seeds, positions)[:, None].to(cdf.dtype) * total, _below(total))
    drawn = torch.searchsorted(cdf, target, right=True)[:, 0].clamp(max=logits.shape[1] - 1)
    return torch.where(valid, torch.where(scale[:, 0] > 0, drawn, greedy), INVALID)


def _below(total: Tensor) -> Tensor:
    """The next smaller number: a product that rounds up to the total would exceed every cumulative sum."""
    return torch.nextafter(total, torch.zeros_like(total))
