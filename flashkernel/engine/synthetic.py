"""A transformer of a known shape with random weights: for measurements that need no text."""

from __future__ import annotations

import torch

from flashkernel import Frequencies
from flashkernel.core.shapes import Model
from flashkernel.engine.config import ModelConfig
from flashkernel.engine.transformer import Layer, Outer, Transformer


def random_transformer(
    shape: Model,
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    context: int = 4096,
    learned_positions: bool = False,
    tied: bool = True,
) -> Transformer:
    """Llama's layers in the sizes of `shape`; with `learned_positions` those of GPT-2. `tied`: the output layer is the
    embedding."""
    rms = not learned_positions
    config = ModelConfig(
        architecture="random",
        vocab=shape.vocab,
        hidden=shape.hidden,
        layers=shape.layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        context=context,
        norm="rms" if rms else "layer",
        eps=1e-5,
        activation="swiglu" if rms else "gelu_tanh",
        packed="halves",
        frequencies=Frequencies.plain(shape.head_dim, 500000.0) if rms else None,
        windows=(None,) * shape.layers,
        tied=tied,
    )

    def weight(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device, dtype=dtype).mul_(size[-1] ** -0.5)

    def one() -> torch.Tensor:
        return torch.ones(shape.hidden, device=device, dtype=dtype)

    def bias(size: int) -> torch.Tensor | None:
        return None if rms else torch.zeros(size, device=device, dtype=dtype)

    heads, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    rows = shape.intermediate * (2 if rms else 1)
    layers = [
        Layer(
            attention_norm=one(), qkv=weight(heads + 2 * keys, shape.hidden), out=weight(shape.hidden, heads),
            mlp_norm=one(), up=weight(rows, shape.hidden), down=weight(shape.hidden, shape.intermediate),
            attention_norm_bias=bias(shape.hidden), qkv_bias=bias(heads + 2 * keys), out_bias=bias(shape.hidden),
            mlp_norm_bias=bias(shape.hidden), up_bias=bias(rows), down_bias=bias(shape.hidden),
        )
        for _ in range(shape.layers)
    ]  # fmt: skip
    embedding = weight(shape.vocab, shape.hidden)
    positions = None if rms else weight(context, shape.hidden)
    head = embedding if tied else weight(shape.vocab, shape.hidden)
    return Transformer(config, Outer(embedding, one(), head, bias(shape.hidden), positions), layers)
