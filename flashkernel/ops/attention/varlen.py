"""Attention over packed sequences, one behind the other."""

from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks.mask import Mask
from flashkernel.blocks.packed import packed_mask
from flashkernel.ops.attention.api import attention


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    causal: bool = False,
    window: int | None = None,
    mask: Mask | Tensor | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` over sequences of different lengths: q is (tokens, heads, head_dim), k and v (tokens, kv_heads, ...).

    Sequence n is q[cu_seqlens_q[n] : cu_seqlens_q[n + 1]], and sees the keys of `cu_seqlens_k` likewise (by default the
    same lengths). `causal` is aligned with each sequence's last key; under `window` a token sees so many, itself
    included, and none behind it. `mask` hides more, in packed positions. Tokens behind the last sequence see nothing.
    Nothing waits for the device. `options` are those of `attention`; with return_lse, lse is (heads, tokens).
    """
    for label, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 3:
            raise ValueError(
                f"attention_varlen: {label} has shape {tuple(x.shape)}; it must be (tokens, heads, head_dim)"
            )
    lengths_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    for label, lengths in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", lengths_k)):
        whole = lengths.ndim == 1 and lengths.shape[0] >= 2 and not lengths.is_floating_point()
        if not whole or lengths.device != q.device or lengths.shape != cu_seqlens_q.shape:
            raise ValueError(
                f"attention_varlen: {label} is {lengths.dtype} {tuple(lengths.shape)} on {lengths.device}; it must be "
                f"whole numbers (sequences + 1,) on {q.device}, as many for keys as for queries"
            )
    if window is not None and window < 1:
        raise ValueError(f"attention_varlen: window is {window}; a token sees itself at least, so 1 or more")
    left = None if window is None else window - 1
    right = 0 if causal or window is not None else None
    packed, _ = packed_mask(cu_seqlens_q.to(torch.int32), lengths_k.to(torch.int32), q.shape[0], left, right)
    seen = packed if mask is None else packed & mask
    found = attention(q[None], k[None], v[None], sinks=sinks, mask=seen, **options)
    return (found[0][0], found[1][0]) if isinstance(found, tuple) else found[0]
