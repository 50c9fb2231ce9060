"""One attention call over a cache as the kernels see it, on every backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashkernel.ops.decode.kernel_args import CachePointers, CacheStrides, Window


@dataclass(frozen=True)
class AttendOptions:
    """The options of `decode_attention` and `paged_attention`, as callers give them."""

    window: int | None = None
    sinks: Tensor | None = None
    sink_tokens: int = 0
    softcap: float = 0.0
    scale: float | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    return_lse: bool = False
    prefix_length: int | Tensor = 0  # of decode_attention alone

    def as_keywords(self) -> dict[str, Any]:
        """The options as a composite backend takes them."""
        return {
            "window": self.window, "sinks": self.sinks, "sink_tokens": self.sink_tokens, "softcap": self.softcap,
            "scale": self.scale, "k_scale": self.k_scale, "v_scale": self.v_scale, "return_lse": self.return_lse,
            "prefix_length": self.prefix_length,
        }  # fmt: skip

    def softmax_scale(self, head_dim: int) -> float:
        """What Q K^T is multiplied by."""
        return head_dim**-0.5 if self.scale is None else self.scale

    def params(self, head_dim: int) -> DecodeParams:
        """The options as kernels take them."""
        scale = float(self.softmax_scale(head_dim))
        return DecodeParams(self.window or 0, self.sink_tokens, scale, float(self.softcap), self.prefix_length)

    def visible_keys(self, capacity: int, seqlen_q: int) -> int:
        """Keys that a sequence's queries see at most."""
        return visible_keys(capacity, seqlen_q, self.window or 0, self.sink_tokens)


def visible_keys(capacity: int, seqlen_q: int, window: int, sink_tokens: int) -> int:
    """Keys that `seqlen_q` queries see at most, each of them `window` (0: all) and the sink tokens."""
    return min(capacity, window + seqlen_q - 1 + sink_tokens) if window else capacity


class CachedKV(NamedTuple):
    """The KV cache: (batch, capacity, kv_heads, dim), or with a page table (pages, page_size, kv_heads, dim)."""

    k: Tensor
    v: Tensor
    seqlens: Tensor  # int32 (batch,)
    page_table: Tensor | None  # int32 (batch, max_pages)
    k_scale: Tensor | None
    v_scale: Tensor | None

    @property
    def page_size(self) -> int:
        """Keys per page; 0 for a contiguous cache."""
        return 0 if self.page_table is None else self.k.shape[1]

    @property
    def capacity(self) -> int:
        """Keys that a sequence can have."""
        return self.k.shape[1] if self.page_table is None else self.page_table.shape[1] * self.k.shape[1]

    @property
    def page_table_words(self) -> Tensor | None:
        """The page table as the Triton kernels read it, in 16-bit words."""
        table = self.page_table
        if table is not None and table.shape[1] == 1:  # whatever its stride there, which a view in words needs to be 1
            table = table.as_strided(table.shape, (table.stride(0), 1))
        return None if table is None else table.view(torch.int16)

    @property
    def pointers(self) -> CachePointers:
        return CachePointers(self.k, self.v, self.k_scale, self.v_scale)

    @property
    def strides(self) -> CacheStrides:
        scale = (0, 0) if self.k_scale is None else self.k_scale.stride()[:2]
        page_table = 0 if self.page_table is None else 2 * self.page_table.stride(0)
        strides = (*self.k.stride()[:3], *self.v.stride()[:3], *scale, page_table)
        return CacheStrides._make(strides)


class DecodeParams(NamedTuple):
    """Everything but the tensors; `prefix` counts the keys all sequences share, as a number or in device memory."""

    window: int  # 0: none
    sink_tokens: int
    scale: float
    softcap: float
    prefix: int | Tensor = 0

    @property
    def prefix_kind(self) -> int:
        """0 without a shared prefix, 1 where its length is a number, 2 where it is a tensor."""
        return 2 if isinstance(self.prefix, Tensor) else 1 if self.prefix > 0 else 0

    @property
    def window_args(self) -> Window:
        return Window(self.window, self.sink_tokens)

    def visible_keys(self, capacity: int, seqlen_q: int) -> int:
        """Keys that a sequence's queries see at most."""
        return visible_keys(capacity, seqlen_q, self.window, self.sink_tokens)
