"""One write into pages as backends see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from flashkernel.blocks.rope import RotaryOptions


@dataclass(frozen=True)
class AppendOptions(RotaryOptions):
    """All options of `append_kv`, as callers give them."""

    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    q: Tensor | None = None


class NewTokens(NamedTuple):
    """The new tokens' keys, values and, where they are rotated along, queries: (tokens, heads, dim) each."""

    k: Tensor
    v: Tensor
    q: Tensor | None


class Pages(NamedTuple):
    """The pages (pages, page_size, kv_heads, dim) and, where they are quantized, their scales."""

    k: Tensor
    v: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
