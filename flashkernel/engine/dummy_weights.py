"""Transformers with random weights ("dummy weights"): for measurements and examples that need no text."""

from __future__ import annotations

import torch

from flashkernel import Frequencies
from flashkernel.core.shapes import Model
from flashkernel.engine.config import ModelConfig
from flashkernel.engine.transformer import LayerWeights, ModelWeights, Transformer

TINY = Model(hidden=32, intermediate=48, heads=4, kv_heads=2, head_dim=8, layers=2, vocab=100)


def tiny_transformer(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Transformer:
    """A model of 100 tokens that generates in milliseconds on a CPU; always the same weights."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return dummy_transformer(TINY, device, dtype, max_position_embeddings=256)


def dummy_transformer(
    shape: Model,
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    max_position_embeddings: int = 4096,
    learned_positions: bool = False,
    tie_word_embeddings: bool = True,
) -> Transformer:
    """A transformer with random weights.

    Args:
        shape: Sizes of a known model.
        device: Where its weights are.
        dtype: Of weights and activations.
        max_position_embeddings: Longest sequence.
        learned_positions: GPT-2's layers; else Llama's.
        tie_word_embeddings: The LM head is the embedding.
    """
    rms = not learned_positions
    config = ModelConfig(
        architecture="random",
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        num_layers=shape.layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=max_position_embeddings,
        norm="rms" if rms else "layer",
        eps=1e-5,
        activation="swiglu" if rms else "gelu_tanh",
        packed="halves",
        frequencies=Frequencies.plain(shape.head_dim, 500000.0) if rms else None,
        sliding_windows=(None,) * shape.layers,
        tie_word_embeddings=tie_word_embeddings,
    )

    def weight(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device, dtype=dtype).mul_(size[-1] ** -0.5)

    def norm() -> torch.Tensor:
        return torch.ones(shape.hidden, device=device, dtype=dtype)

    def bias(size: int) -> torch.Tensor | None:
        return None if rms else torch.zeros(size, device=device, dtype=dtype)

    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    inner = shape.intermediate * (2 if rms else 1)
    layers = [
        LayerWeights(
            attention_norm=norm(), qkv_proj=weight(q + 2 * kv, shape.hidden), o_proj=weight(shape.hidden, q),
            mlp_norm=norm(), gate_up_proj=weight(inner, shape.hidden),
            down_proj=weight(shape.hidden, shape.intermediate), attention_norm_bias=bias(shape.hidden),
            qkv_proj_bias=bias(q + 2 * kv), o_proj_bias=bias(shape.hidden), mlp_norm_bias=bias(shape.hidden),
            gate_up_proj_bias=bias(inner), down_proj_bias=bias(shape.hidden),
        )
        for _ in range(shape.layers)
    ]  # fmt: skip
    embedding = weight(shape.vocab, shape.hidden)
    positions = None if rms else weight(max_position_embeddings, shape.hidden)
    lm_head = embedding if tie_word_embeddings else weight(shape.vocab, shape.hidden)
    return Transformer(config, ModelWeights(embedding, norm(), lm_head, bias(shape.hidden), positions), layers)
