"""A mixture of experts: each token goes through the few experts that its router chose."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import flashkernel as fk

if TYPE_CHECKING:
    from flashkernel.engine.config import ModelConfig
    from flashkernel.engine.transformer import Layer

_linear: Any = fk.linear  # one tensor or several, as the arguments say
DENSE_TOKENS = 64  # on a GPU, up to so many tokens go through all experts: nothing then waits for the router's choice


def mixture(x: Tensor, layer: Layer, config: ModelConfig) -> Tensor:
    """x [tokens, hidden] through its experts, weighted and added up, in x's dtype."""
    assert layer.router is not None
    logits = _linear(x, layer.router, layer.router_bias, out_dtype=torch.float32)
    best, chosen = torch.topk(logits, config.experts_per_token)
    weights = torch.softmax(best, -1)  # the same as the share among all, divided by that of the chosen
    if x.device.type == "cuda" and x.shape[0] <= DENSE_TOKENS:
        return _all_experts(x, layer, config, weights, chosen)
    return _chosen_experts(x, layer, config, weights, chosen)


def _all_experts(x: Tensor, layer: Layer, config: ModelConfig, weights: Tensor, chosen: Tensor) -> Tensor:
    """Every expert for every token, those not chosen with weight 0. Reads all weights, which few tokens do anyway, and
    no shape depends on the choice: a CUDA graph can hold it."""
    share = torch.zeros(x.shape[0], config.experts, device=x.device).scatter_(1, chosen, weights)  # [tokens, experts]
    both = x.expand(config.experts, *x.shape) @ layer.up.transpose(1, 2)  # [experts, tokens, 2 inner]
    if layer.up_bias is not None:
        both = both + layer.up_bias[:, None]
    y = _gate(both, config) @ layer.down.transpose(1, 2)  # [experts, tokens, hidden]
    if layer.down_bias is not None:
        y = y + layer.down_bias[:, None]
    return torch.einsum("eth,te->th", y.float(), share).to(x.dtype)


def _chosen_experts(x: Tensor, layer: Layer, config: ModelConfig, weights: Tensor, chosen: Tensor) -> Tensor:
    """Expert by expert, each for the tokens that chose it; the host learns how many those are."""
    order = chosen.flatten().argsort(stable=True)  # places in [tokens * experts_per_token], by expert
    counts = torch.bincount(chosen.flatten(), minlength=config.experts).tolist()
    token = order // config.experts_per_token
    share = weights.flatten()[order]
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert, mine in enumerate(zip(token.split(counts), share.split(counts))):
        rows, part = mine
        if rows.numel():
            bias = None if layer.up_bias is None else layer.up_bias[expert]
            h = _gate(_linear(x[rows], layer.up[expert], bias), config)
            bias = None if layer.down_bias is None else layer.down_bias[expert]
            y = _linear(h, layer.down[expert], bias)
            total.index_add_(0, rows, y.float() * part[:, None])
    return total.to(x.dtype)


def _gate(both: Tensor, config: ModelConfig) -> Tensor:
    gate = fk.gpt_oss_glu if config.activation == "gpt_oss_glu" else fk.swiglu
    return gate(both, packed=config.packed)
