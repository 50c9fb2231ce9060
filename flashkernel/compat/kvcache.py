"""flash-attn 2's attention with a cache of keys and values, in its signature and meaning.

What is different: any float dtype, any device; pages of 16 to 256 keys; `num_splits` is accepted and not needed, since
the work is cut into equal shares whatever the lengths; positions beyond the cache are not written (flash-attn writes
past its end). The new keys and values are appended in place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashkernel.compat.settings import integer, optional_number, positive_softcap, window_sides
from flashkernel.ops.append_kv import append_kv
from flashkernel.ops.decode import decode_attention
from flashkernel.ops.rope import rope

NAME = "flash_attn_with_kvcache"


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of q (batch, seqlen_q, heads, dim) to a cache, to which k and v (batch, seqlen_new, heads_k, dim) are
    appended first, in place, where given.

    The cache is (batch_cache, seqlen_cache, heads_k, dim), of which sequence b is row cache_batch_idx[b], or with
    `block_table`, int32 (batch, most_blocks), pages (blocks, page_size, heads_k, dim). It holds cache_seqlens keys, one
    number or one a sequence; all of it where that is left out. With rotary_cos and rotary_sin (positions, dim / 2) the
    new k, and q, are rotated by their positions from cache_seqlens on; q throughout by the first where nothing is
    masked. Query i sees key j where -left <= j - (i + keys - seqlen_q) <= right, causal being right = 0.
    """
    _refuse(cache_leftpad, alibi_slopes, cache_batch_idx, block_table)
    batch, queries = q.shape[:2]
    causal, interleaved = bool(causal), bool(rotary_interleaved)
    sides = window_sides(NAME, window_size)
    before = _lengths(cache_seqlens, batch, k_cache, block_table, q.device)
    masked = causal or sides[0] >= 0 or sides[1] >= 0
    if k is None or v is None:
        if k is not None or v is not None or rotary_cos is not None:
            raise ValueError(f"{NAME}: k and v come together, and rotary_cos only with them; give both, or none")
        after = before
    else:
        if cache_seqlens is None:
            raise ValueError(f"{NAME}: cache_seqlens is missing; it says where the new k and v go")
        q = _append(
            q, k, v, k_cache, v_cache, before, cache_batch_idx, block_table, rotary_cos, rotary_sin, interleaved, masked
        )
        after = before + k.shape[1]
    if cache_batch_idx is not None:
        k_cache, block_table = _rows_as_pages(k_cache, cache_batch_idx)
        v_cache, _ = _rows_as_pages(v_cache, cache_batch_idx)
    window = _window(queries, causal, sides)
    folded = queries > 1 and not masked  # every query sees every key: queries are so many more heads of a group
    rows = _fold(q, k_cache.shape[2]) if folded else q
    out, lse = decode_attention(
        rows, k_cache, v_cache, after, block_table, window=window, softcap=positive_softcap(NAME, softcap),
        scale=optional_number(NAME, "softmax_scale", softmax_scale), return_lse=True,
    )  # fmt: skip
    if folded:
        out, lse = _unfold(out, queries, k_cache.shape[2]), lse.view(batch, -1, queries)
    return (out, lse) if return_softmax_lse else out


def _refuse(
    leftpad: Tensor | None, slopes: Tensor | None, batch_idx: Tensor | None, block_table: Tensor | None
) -> None:
    if leftpad is not None:
        raise NotImplementedError(f"{NAME}: cache_leftpad is not supported; shift the cache, or use pages")
    if slopes is not None:
        raise NotImplementedError(
            f"{NAME}: alibi_slopes are not supported with a cache; flashkernel.attention takes them"
        )
    if batch_idx is not None and block_table is not None:
        raise ValueError(f"{NAME}: cache_batch_idx picks rows of a cache without pages; leave it or block_table out")


def _lengths(
    given: int | Tensor | None, batch: int, cache: Tensor, block_table: Tensor | None, device: torch.device
) -> Tensor:
    """Keys in the cache, int32 (batch,); a number or a tensor of one holds for all sequences."""
    if isinstance(given, Tensor):
        if given.is_floating_point() or given.dtype is torch.bool:
            raise TypeError(f"{NAME}: cache_seqlens is {given.dtype} {tuple(given.shape)}; it must be int32 ({batch},)")
        return given.to(device, torch.int32).expand(batch) if given.ndim == 0 else given.to(torch.int32)
    if given is None:
        given = cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    return torch.full((batch,), integer(NAME, "cache_seqlens", given), dtype=torch.int32, device=device)


def _window(queries: int, causal: bool, window_size: tuple[int, int]) -> int | None:
    """flash-attn's (left, right) as a number of keys that a query sees, itself included."""
    left, right = window_size
    if queries > 1 and not causal and right != 0 and (left >= 0 or right > 0):
        raise NotImplementedError(
            f"{NAME}: window_size={window_size} without causal lets {queries} queries see keys behind their own; use "
            "causal=True, one query, or flash_attn_func"
        )
    return None if left < 0 else left + 1


def _append(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    before: Tensor,
    batch_idx: Tensor | None,
    block_table: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    masked: bool,
) -> Tensor:
    """Write k and v behind each sequence's last key, rotated where there are angles; returns q, rotated likewise."""
    new = k.shape[1]
    position = before[:, None] + torch.arange(new, dtype=torch.int32, device=k.device)  # [batch, new]
    slots = _slots(position, k_cache, batch_idx, block_table).flatten()
    flat_k, flat_v = k.flatten(0, 1), v.flatten(0, 1)
    if cos is None or sin is None:
        append_kv(flat_k, flat_v, k_cache, v_cache, slots)
        return q
    angles: dict[str, Any] = {"cos": cos, "sin": sin, "interleaved": interleaved}
    if masked and q.shape[1] == new:
        turned = append_kv(
            flat_k, flat_v, k_cache, v_cache, slots, q=q.flatten(0, 1), positions=position.flatten(), **angles
        )
        assert turned is not None
        return turned.view(q.shape)
    append_kv(flat_k, flat_v, k_cache, v_cache, slots, positions=position.flatten(), **angles)
    steps = torch.arange(q.shape[1], dtype=torch.int32, device=q.device) * int(masked)
    rows = rope(q, positions=before[:, None] + steps, **angles)
    assert isinstance(rows, Tensor)
    return rows


def _slots(position: Tensor, cache: Tensor, batch_idx: Tensor | None, block_table: Tensor | None) -> Tensor:
    """Where each position lies in the cache, counted in keys, int64; -1 beyond its end."""
    size = cache.shape[1]
    if block_table is None:
        row = torch.arange(position.shape[0], device=position.device) if batch_idx is None else batch_idx.long()
        return torch.where(position < size, row[:, None] * size + position, -1)
    most = block_table.shape[1]
    page = block_table.long().gather(1, (position // size).clamp(max=most - 1).long())
    return torch.where(position < most * size, page * size + position % size, -1)


def _rows_as_pages(cache: Tensor, batch_idx: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of a cache as pages and their table, so that they are read where they are; copied where they cannot be."""
    rows, capacity = cache.shape[:2]
    size = next((size for size in (256, 128, 64, 32, 16) if capacity % size == 0), 0)
    if size == 0 or cache.stride(0) != capacity * cache.stride(1):
        size = next(size for size in (256, 128, 64, 32, 16) if capacity >= size or size == 16)
        short = -capacity % size
        cache = torch.nn.functional.pad(cache[batch_idx.long()], (0, 0, 0, 0, 0, short))
        batch_idx = torch.arange(batch_idx.shape[0], device=cache.device)
        rows, capacity = cache.shape[:2]
    each = capacity // size
    table = batch_idx.to(torch.int32)[:, None] * each + torch.arange(each, dtype=torch.int32, device=cache.device)
    return cache.view(rows * each, size, *cache.shape[2:]), table.to(torch.int32)


def _fold(q: Tensor, kv_heads: int) -> Tensor:
    """(batch, queries, heads, dim) -> (batch, 1, heads * queries, dim), heads of a group and queries side by side."""
    batch, queries, heads, dim = q.shape
    by_group = q.view(batch, queries, kv_heads, heads // kv_heads, dim).permute(0, 2, 3, 1, 4)
    return by_group.reshape(batch, 1, heads * queries, dim)


def _unfold(out: Tensor, queries: int, kv_heads: int) -> Tensor:
    batch, _, rows, dim = out.shape
    by_group = out.view(batch, kv_heads, rows // (kv_heads * queries), queries, dim)
    return by_group.permute(0, 3, 1, 2, 4).reshape(batch, queries, rows // queries, dim)
