"""Factors on the inputs of a projection, folded into what computes those inputs: the model's function stays the same.

y = W x = (W diag(s)) (x / s). AWQ and SmoothQuant choose s; x / s costs nothing where the operation before is linear in
each channel: a norm's weight, the rows of up in front of down, the rows of v in front of o.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashkernel.engine.config import ModelConfig
from flashkernel.engine.transformer import LayerWeights


def folds(layer: LayerWeights, config: ModelConfig, name: str) -> bool:
    """Whether the inputs of a projection can be divided by factors."""
    if layer.router is not None and name in ("gate_up_proj", "down_proj"):
        return False  # a router reads the norm too, and experts have no projections of their own here
    return name != "down_proj" or config.activation in ("swiglu", "geglu", "reglu")


def shared_channels(values: Tensor, config: ModelConfig, name: str, largest: bool) -> Tensor:
    """Statistics of input channels, made equal where channels must have one factor.

    The inputs of o_proj are heads; query heads of a group read the same rows of v.
    """
    if name != "o_proj" or config.heads == config.kv_heads:
        return values
    heads = values.view(config.kv_heads, -1, config.head_dim)
    shared = heads.amax(1, keepdim=True) if largest else heads.mean(1, keepdim=True)
    return shared.expand_as(heads).reshape(-1)


def fold(layer: LayerWeights, config: ModelConfig, name: str, factors: Tensor) -> LayerWeights:
    """Returns the layer with the columns of a projection multiplied by factors, and its inputs divided by them."""
    found: dict[str, Any] = {name: _scaled(getattr(layer, name), factors[None, :])}
    inverse = 1 / factors
    if name in ("qkv_proj", "gate_up_proj"):
        norm = "attention_norm" if name == "qkv_proj" else "mlp_norm"
        found[norm] = _scaled(getattr(layer, norm), inverse, config.norm_offset)
        bias = getattr(layer, f"{norm}_bias")
        found[f"{norm}_bias"] = None if bias is None else _scaled(bias, inverse)
        return replace(layer, **found)
    before = "qkv_proj" if name == "o_proj" else "gate_up_proj"
    rows = _row_factors(layer, config, name, inverse)
    found[before] = _scaled(getattr(layer, before), rows[:, None])
    bias = getattr(layer, f"{before}_bias")
    if bias is not None:
        found[f"{before}_bias"] = _scaled(bias, rows)
    return replace(layer, **found)


def _row_factors(layer: LayerWeights, config: ModelConfig, name: str, inverse: Tensor) -> Tensor:
    """Factors on the rows of the projection before: those of v, or of up."""
    before: Any = layer.qkv_proj if name == "o_proj" else layer.gate_up_proj
    rows = torch.ones(before.shape[0], device=inverse.device)
    if name == "o_proj":
        heads = inverse.view(config.kv_heads, -1, config.head_dim)[:, 0]  # equal within a group
        rows[-config.kv_heads * config.head_dim :] = heads.reshape(-1)
    elif config.packed == "interleaved":
        rows[1::2] = inverse
    else:
        rows[len(rows) // 2 :] = inverse
    return rows


def _scaled(value: Any, factors: Tensor, offset: float = 0.0) -> Tensor:
    """(value + offset) * factors - offset: a norm multiplies by its weight plus an offset."""
    return ((value.float() + offset) * factors - offset).to(value.dtype)
