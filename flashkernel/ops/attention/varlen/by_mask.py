"""Packed sequences as one sequence under a mask: how backends without kernels of their own for them serve the call."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashkernel.blocks.mask import Mask
from flashkernel.blocks.packed import packed_mask
from flashkernel.ops.attention.api import attention
from flashkernel.ops.attention.varlen.params import Window, sides


def attention_varlen(
    backend: str, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = None,
    sinks: Tensor | None = None, *, causal: bool = False, window: Window = None, mask: Mask | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`attention` by a backend under the mask of packed sequences."""
    lengths_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    packed, _ = packed_mask(cu_seqlens_q, lengths_k, q.shape[0], *sides(causal, window))
    seen = packed if mask is None else packed & mask
    found = attention(q[None], k[None], v[None], sinks=sinks, mask=seen, backend=backend, **options)
    return (found[0][0], found[1][0]) if isinstance(found, tuple) else found[0]


def triton(*args: Any, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
    """`attention_varlen` by the Triton kernels of attention."""
    return attention_varlen("triton", *args, **options)


def cuda(*args: Any, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
    """`attention_varlen` by the CUDA C++ kernels of attention."""
    return attention_varlen("cuda", *args, **options)
