"""Sampling by torch's own operators: the CPU default. The vocabulary is sorted only if some row truncates it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks.values import has_values
from flashkernel.ops.sampling.params import INVALID, LOWEST, SampleParams, from_keywords
from flashkernel.ops.sampling.reference import adjusted, kept, uniform


def sample(logits: Tensor, seeds: Tensor, positions: Tensor, **given: Any) -> Tensor:
    params, states = from_keywords(seeds, positions, given)
    logits = adjusted(logits.float(), params, states)
    temperature, (largest, greedy) = params.temperature, logits.max(-1)
    valid = (largest.abs() < torch.inf) & (largest > LOWEST)
    greedy = torch.where(valid, greedy, INVALID)
    if temperature is not None and _none(temperature > 0):
        return greedy
    scale = torch.ones_like(largest) if temperature is None else temperature.float()
    logits = torch.where(valid[:, None] & (logits > LOWEST), logits, -torch.inf)
    logits = torch.where(valid[:, None], logits, 0.0)
    probs = torch.softmax(logits / torch.where(scale > 0, scale, 1.0)[:, None], -1)
    if _truncates(params):
        probs = probs * kept(logits, params)
    cdf = probs.cumsum(-1)
    total = cdf[:, -1:]
    below = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(uniform(seeds, positions)[:, None].float() * total, below)
    drawn = torch.searchsorted(cdf, target, right=True)[:, 0].clamp(max=logits.shape[1] - 1)
    return torch.where((scale > 0) & valid, drawn, greedy)


def _none(wanted: Tensor) -> bool:
    """Whether no row wants it. Only a CPU looks: elsewhere the host would wait for the answer."""
    return wanted.device.type == "cpu" and has_values(wanted) and not bool(wanted.any())


def _truncates(params: SampleParams) -> bool:
    given = ((params.top_k, 0), (params.min_p, 0.0))
    asks = [values > least for values, least in given if values is not None]
    if params.top_p is not None:
        asks.append(params.top_p < 1)
    return any(not _none(ask) for ask in asks)
