"""One write into pages as backends see it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flashkernel.blocks.rope import RotaryOptions


@dataclass(frozen=True)
class AppendOptions(RotaryOptions):
    """All options of `append_kv`, as callers give them."""

    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    q: Tensor | None = None


@dataclass(frozen=True)
class NewTokens:
    """The new tokens' keys, values and, where they are rotated along, queries: (tokens, heads, dim) each."""

    k: Tensor
    v: Tensor
    q: Tensor | None


@dataclass(frozen=True)
class Pages:
    """The pages (pages, page_size, kv_heads, dim) and, where they are quantized, their scales."""

    k: Tensor
    v: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None


@dataclass(frozen=True)
class Rotation:
    """How a kernel rotates: by tables, or by rates (frequencies in fixed point); `dim` 0 is not at all."""

    cos: Tensor | None
    sin: Tensor | None
    rates: Tensor | None
    positions: Tensor | None
    scaling: float
    dim: int
    interleaved: bool
