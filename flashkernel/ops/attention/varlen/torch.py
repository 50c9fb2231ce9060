"""Attention over packed sequences by torch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashkernel.ops.attention.varlen import by_mask


def attention_varlen(*args: Any, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
    """`attention_varlen` by attention in torch."""
    return by_mask.attention_varlen("torch", *args, **options)
