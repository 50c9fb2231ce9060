"""flash-attn 2's functions in its signatures: `from flashkernel.compat.flash_attn import flash_attn_func`.

What is different: any float dtype, any device; value heads may have another size; a row that sees nothing has LSE -inf
(flash-attn: +inf); LSE is differentiable; the third result of return_attn_probs, flash-attn's testing aid, is None.
`max_seqlen_*` are accepted and not needed. Where dropout_p > 0 the seed is drawn by torch's generator of q's device,
which torch.manual_seed and activation checkpointing restore. Attention with a cache is in kvcache.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks import expression as ex
from flashkernel.blocks import mask as masks
from flashkernel.blocks.expression import Table
from flashkernel.blocks.mask import Mask
from flashkernel.blocks.packed import packed_mask
from flashkernel.compat.kvcache import flash_attn_with_kvcache
from flashkernel.compat.settings import number, optional_number, positive_softcap, window_sides
from flashkernel.ops.attention import attention

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

Result = Tensor | tuple[Tensor, Tensor, None]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Attention of q (batch, seqlen_q, heads, dim) to k and v (batch, seqlen_k, heads_k, dim).

    Query i sees key j where -left <= j - (i + seqlen_k - seqlen_q) <= right, (left, right) being window_size and -1 no
    limit; causal is right = 0. ALiBi slopes are (heads,) or (batch, heads). With return_attn_probs the result is
    (out, lse, None), lse float32 (batch, heads, seqlen_q).
    """
    name = "flash_attn_func"
    options = _options(name, dropout_p, softmax_scale, softcap, deterministic, return_attn_probs)
    mask = _window_mask(name, causal, window_size)
    return _result(attention(q, k, v, alibi_slopes=alibi_slopes, mask=mask, **options), return_attn_probs)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` with keys and values in one tensor: (batch, seqlen_k, 2, heads_k, dim)."""
    k, v = _unpack("flash_attn_kvpacked_func", "kv", kv, 2, 5)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` with queries, keys and values in one tensor: (batch, seqlen, 3, heads, dim)."""
    q, k, v = _unpack("flash_attn_qkvpacked_func", "qkv", qkv, 3, 5)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """Sequences one behind the other: q (total_q, heads, dim), k and v (total_k, heads_k, dim).

    Sequence n is q[cu_seqlens_q[n]:cu_seqlens_q[n + 1]] and sees the keys of cu_seqlens_k likewise; windows, causality
    and ALiBi count within it as in `flash_attn_func`. Slopes are (heads,) or (batch, heads), lse (heads, total_q).
    """
    name = "flash_attn_varlen_func"
    if block_table is not None:
        raise NotImplementedError(
            f"{name}: block_table (a paged key/value cache) is not supported; gather the pages into k and v first"
        )
    for tensor, label in ((q, "q"), (k, "k"), (v, "v")):
        if tensor.ndim != 3:
            raise ValueError(f"{name}: {label} has shape {tuple(tensor.shape)}; it must be (total, heads, head_dim)")
    lengths = _check_lengths(name, cu_seqlens_q, cu_seqlens_k, q)
    left, right = _sides(name, causal, window_size)
    mask, diagonal = packed_mask(*lengths, q.shape[0], left, right)
    options = _options(name, dropout_p, softmax_scale, softcap, deterministic, return_attn_probs)
    if alibi_slopes is not None:
        options |= _packed_alibi(alibi_slopes, diagonal, lengths, q.shape[1])
    found = attention(q[None], k[None], v[None], mask=mask, **options)
    if not return_attn_probs:
        return found[0]
    return found[0][0], found[1][0], None


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` with keys and values in one tensor: (total_k, 2, heads_k, dim)."""
    k, v = _unpack("flash_attn_varlen_kvpacked_func", "kv", kv, 2, 4)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` with queries, keys and values in one tensor: (total, 3, heads, dim)."""
    q, k, v = _unpack("flash_attn_varlen_qkvpacked_func", "qkv", qkv, 3, 4)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def _sides(name: str, is_causal: bool, window_size: tuple[int, int]) -> tuple[int | None, int | None]:
    """How many keys a query sees before and behind the one it is aligned with; None for all."""
    left, right = (None if side < 0 else side for side in window_sides(name, window_size))
    return left, 0 if is_causal else right


def _window_mask(name: str, is_causal: bool, window_size: tuple[int, int]) -> Mask | None:
    left, right = _sides(name, is_causal, window_size)
    if left is None:
        return None if right is None else masks.causal() if right == 0 else masks.window(None, right)
    seen = left + 1  # flash-attn does not count the key a query is aligned with
    return masks.causal() & masks.window(seen) if right == 0 else masks.window(seen, right)


def _options(
    name: str, dropout_p: float, softmax_scale: float | None, softcap: float, deterministic: bool, return_lse: bool
) -> dict[str, Any]:
    return {
        "scale": optional_number(name, "softmax_scale", softmax_scale),
        "softcap": positive_softcap(name, softcap),
        "dropout": number(name, "dropout_p", dropout_p),
        "deterministic": bool(deterministic),
        "return_lse": bool(return_lse),
    }


def _result(found: Tensor | tuple[Tensor, Tensor], with_lse: bool) -> Result:
    return (found[0], found[1], None) if with_lse else found  # type: ignore[return-value]


def _unpack(name: str, label: str, packed: Tensor, parts: int, ndim: int) -> tuple[Tensor, ...]:
    if packed.ndim != ndim or packed.shape[-3] != parts:
        raise ValueError(
            f"{name}: {label} has shape {tuple(packed.shape)}; it must have {ndim} dims ending in "
            f"({parts}, heads, head_dim)"
        )
    return packed.unbind(-3)


def _check_lengths(name: str, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    for lengths, label in ((cu_seqlens_q, "cu_seqlens_q"), (cu_seqlens_k, "cu_seqlens_k")):
        if lengths.ndim != 1 or lengths.is_floating_point() or lengths.device != q.device:
            raise ValueError(
                f"{name}: {label} is {lengths.dtype} {tuple(lengths.shape)} on {lengths.device}; it must be int32 "
                f"(batch + 1,) on {q.device}"
            )
    if cu_seqlens_q.shape != cu_seqlens_k.shape or cu_seqlens_q.shape[0] < 2:
        raise ValueError(
            f"{name}: cu_seqlens_q has {cu_seqlens_q.shape[0]} entries and cu_seqlens_k {cu_seqlens_k.shape[0]}; both "
            f"must have one more than there are sequences, of which there must be one at least"
        )
    same = cu_seqlens_q is cu_seqlens_k
    first = cu_seqlens_q.to(torch.int32).contiguous()
    return first, first if same else cu_seqlens_k.to(torch.int32).contiguous()


def _packed_alibi(slopes: Tensor, diagonal: Tensor, lengths: tuple[Tensor, Tensor], heads: int) -> dict[str, Any]:
    """ALiBi within packed sequences: the plain one where queries and keys are packed alike, else a score function."""
    sequences = lengths[0].shape[0] - 1
    if tuple(slopes.shape) not in ((heads,), (sequences, heads)):
        raise ValueError(
            f"flash_attn_varlen_func: alibi_slopes has shape {tuple(slopes.shape)}; it must be ({heads},) or "
            f"({sequences}, {heads}): heads, or sequences and heads"
        )
    if slopes.ndim == 1 and lengths[0] is lengths[1]:
        return {"alibi_slopes": slopes}
    if slopes.requires_grad:
        raise NotImplementedError(
            "flash_attn_varlen_func: slopes have a gradient only where they are (heads,) and cu_seqlens_q is "
            "cu_seqlens_k; detach alibi_slopes"
        )
    aligned = Table(diagonal)
    if slopes.ndim == 1:
        of_head = Table(slopes.float())
        return {"score": ex.score_function(lambda s, b, h, q, k: s - of_head[h] * ex.absolute(aligned[q] - k))}
    token = torch.arange(diagonal.shape[0], dtype=torch.int32, device=diagonal.device)
    sequence = (torch.searchsorted(lengths[0], token, right=True) - 1).clamp(max=sequences - 1)
    of_token = Table(slopes.float()[sequence])  # [total_q, heads]
    return {"score": ex.score_function(lambda s, b, h, q, k: s - of_token[q, h] * ex.absolute(aligned[q] - k))}
