"""Mixture of experts: each token goes through the few experts that its router chose."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import flashkernel as fk

if TYPE_CHECKING:
    from flashkernel.engine.config import ModelConfig
    from flashkernel.engine.transformer import LayerWeights

_linear: Any = fk.linear  # returns one tensor or several, depending on its arguments


def moe(x: Tensor, layer: LayerWeights, config: ModelConfig) -> Tensor:
    """Sum of the chosen experts' outputs, weighted by the router; x is [tokens, hidden], as is the result.

    Nothing waits for the router on a GPU, and no shape depends on it: a CUDA graph can hold it.
    """
    assert layer.router is not None
    logits = _linear(x, layer.router, layer.router_bias, out_dtype=torch.float32)
    routing = fk.moe_route(logits, config.router)
    return fk.moe_experts(
        x, routing, layer.gate_up_proj, layer.down_proj, layer.gate_up_proj_bias, layer.down_proj_bias,
        activation=config.activation, packed=config.packed,
    )  # fmt: skip
