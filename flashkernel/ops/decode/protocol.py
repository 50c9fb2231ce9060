"""What kernel modules of attention over a cache offer: `DecodeKernels` and `PagedKernels`. They are forward-only."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class DecodeKernels(Protocol):
    """A module such as `triton` or `hopper`, for decode_attention."""

    def forward(self, q: Tensor, cache: Any, sinks: Tensor | None, params: Any) -> tuple[Tensor, Tensor]:
        """Returns o (batch, seqlen_q, heads, value_dim) in q's dtype and lse, float32 (batch, heads, seqlen_q)."""


class PagedKernels(Protocol):
    """A module such as `triton`, for paged_attention."""

    def forward_packed(
        self, q: Tensor, cu_seqlens_q: Tensor, cache: Any, sinks: Tensor | None, params: Any
    ) -> tuple[Tensor, Tensor]:
        """Returns (o, lse): o (tokens, heads, value_dim) in q's dtype, lse float32 (heads, tokens)."""


PROTOCOLS = {"decode_attention": DecodeKernels, "paged_attention": PagedKernels}
