"""Shapes of real models: the one table that benchmark cases are drawn from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """The sizes that decide what a transformer's kernels see."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    vocab: int


MODELS = {
    "gpt2": Model(768, 3072, 12, 12, 64, 12, 50257),
    "llama-3.2-1b": Model(2048, 8192, 32, 8, 64, 16, 128256),
    "llama-3.1-8b": Model(4096, 14336, 32, 8, 128, 32, 128256),
    "llama-3.1-70b": Model(8192, 28672, 64, 8, 128, 80, 128256),
    "qwen3-8b": Model(4096, 12288, 32, 8, 128, 36, 151936),
    "gpt-oss-20b": Model(2880, 2880, 64, 8, 64, 24, 201088),
    "mixtral-8x7b": Model(4096, 14336, 32, 8, 128, 32, 32000),
    "qwen3-30b-a3b": Model(2048, 768, 32, 4, 128, 48, 151936),  # intermediate: of an expert
    "deepseek-v3": Model(7168, 18432, 128, 128, 192, 61, 129280),
}
