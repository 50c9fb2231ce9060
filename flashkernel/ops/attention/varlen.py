"""Attention over packed sequences, one behind the other."""

from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks.mask import Mask, check_causal_window
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
    """`attention` over packed sequences of different lengths, one behind the other.

    Sequence n has the queries q[cu_seqlens_q[n] : cu_seqlens_q[n + 1]] and sees the keys of `cu_seqlens_k` likewise.
    Tokens behind the last sequence see nothing. Nothing waits for the device.

    Args:
        q: (tokens, heads, head_dim).
        k: (tokens, kv_heads, head_dim), in q's dtype.
        v: (tokens, kv_heads, value_dim), in q's dtype.
        cu_seqlens_q: integers (sequences + 1,), the cumulative lengths of the queries, from 0 on.
        cu_seqlens_k: the same of the keys; None for those of the queries.
        sinks: (heads,), learned logits (see `attention`).
        causal: a query sees the keys up to its own position; the last query of a sequence is aligned with its last key.
        window: a query sees so many keys up to its own, itself included, and no later ones; None is no window.
        mask: hides more, in packed positions.
        options: those of `attention`.

    Returns:
        (tokens, heads, value_dim) in q's dtype; with `return_lse` also the lse, float32 (heads, tokens).

    Example:
        >>> import torch
        >>> import flashkernel as fk
        >>> q = k = v = torch.randn(7, 2, 16)
        >>> cu_seqlens = torch.tensor([0, 3, 7])  # sequences of 3 and 4 tokens
        >>> out = fk.attention_varlen(q, k, v, cu_seqlens, causal=True)
        >>> first = fk.attention(q[None, :3], k[None, :3], v[None, :3], causal=True)
        >>> torch.allclose(out[:3], first[0], atol=1e-6)
        True
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
    window = check_causal_window("attention_varlen", causal, window)
    left = None if window is None else window - 1
    right = 0 if causal or window is not None else None
    packed, _ = packed_mask(cu_seqlens_q.to(torch.int32), lengths_k.to(torch.int32), q.shape[0], left, right)
    seen = packed if mask is None else packed & mask
    found = attention(q[None], k[None], v[None], sinks=sinks, mask=seen, **options)
    return (found[0][0], found[1][0]) if isinstance(found, tuple) else found[0]
