"""Mixture of experts: each token goes through the few experts that its router chose."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import flashkernel as fk
from flashkernel import Weight

if TYPE_CHECKING:
    from flashkernel.engine.config import ModelConfig
    from flashkernel.engine.transformer import LayerWeights

_linear: Any = fk.linear  # returns one tensor or several, depending on its arguments
ALL_EXPERTS_TOKENS = 64  # on a GPU, up to so many tokens go through all experts: nothing then waits for the router


def moe(x: Tensor, layer: LayerWeights, config: ModelConfig) -> Tensor:
    """Sum of the chosen experts' outputs, weighted by the router; x is [tokens, hidden], as is the result."""
    assert layer.router is not None
    logits = _linear(x, layer.router, layer.router_bias, out_dtype=torch.float32)
    top_logits, top_experts = torch.topk(logits, config.num_experts_per_token)
    weights = torch.softmax(top_logits, -1)  # the softmax over all experts, renormalised to the chosen ones
    if x.device.type == "cuda" and x.shape[0] <= ALL_EXPERTS_TOKENS:
        return _all_experts(x, layer, config, weights, top_experts)
    return _chosen_experts(x, layer, config, weights, top_experts)


def _all_experts(x: Tensor, layer: LayerWeights, config: ModelConfig, weights: Tensor, chosen: Tensor) -> Tensor:
    """Runs every expert on every token, with weight 0 if it is not chosen.

    This reads all weights, which few tokens do anyway, and no shape depends on the router: a CUDA graph can hold it.
    """
    dense = torch.zeros(x.shape[0], config.num_experts, device=x.device).scatter_(1, chosen, weights)
    gate_up = _each_expert(x.expand(config.num_experts, *x.shape), layer.gate_up_proj)  # [experts, tokens, 2 inner]
    if layer.gate_up_proj_bias is not None:
        gate_up = gate_up + layer.gate_up_proj_bias[:, None]
    y = _each_expert(_glu(gate_up, config), layer.down_proj)  # [experts, tokens, hidden]
    if layer.down_proj_bias is not None:
        y = y + layer.down_proj_bias[:, None]
    return torch.einsum("eth,te->th", y.float(), dense).to(x.dtype)


def _each_expert(x: Tensor, weights: Tensor | Weight) -> Tensor:
    """x [experts, tokens, in] through each expert's own weight (out, in).

    Tensors are one batched product. Quantized weights are a `linear` for each expert, which reads them as they are.
    """
    if isinstance(weights, Tensor):
        return x @ weights.transpose(1, 2)
    return torch.stack([_linear(rows, weights[expert]) for expert, rows in enumerate(x.unbind())])


def _chosen_experts(x: Tensor, layer: LayerWeights, config: ModelConfig, weights: Tensor, chosen: Tensor) -> Tensor:
    """Runs each expert on the tokens that chose it; the host reads how many those are."""
    order = chosen.flatten().argsort(stable=True)  # indices into [tokens * num_experts_per_token], sorted by expert
    counts = torch.bincount(chosen.flatten(), minlength=config.num_experts).tolist()
    token = order // config.num_experts_per_token
    weight = weights.flatten()[order]
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert, (rows, scale) in enumerate(zip(token.split(counts), weight.split(counts))):
        if rows.numel():
            bias = None if layer.gate_up_proj_bias is None else layer.gate_up_proj_bias[expert]
            h = _glu(_linear(x[rows], layer.gate_up_proj[expert], bias), config)
            bias = None if layer.down_proj_bias is None else layer.down_proj_bias[expert]
            y = _linear(h, layer.down_proj[expert], bias)
            total.index_add_(0, rows, y.float() * scale[:, None])
    return total.to(x.dtype)


def _glu(gate_up: Tensor, config: ModelConfig) -> Tensor:
    function = fk.gpt_oss_glu if config.activation == "gpt_oss_glu" else fk.swiglu
    return function(gate_up, packed=config.packed)
