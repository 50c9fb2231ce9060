"""flash-attn 2's attention with a KV cache, with its signature and meaning.

Differences: any float dtype, any device; pages of any multiple of 16 keys; `num_splits` is accepted and not needed,
since the split schedule balances programs for any lengths; positions beyond the cache are not written (flash-attn
writes past its end). The new keys and values are appended in place. With cache_leftpad, alibi_slopes, or a window that
lets several queries see later keys, the cache is copied first: kernels for decoding have none of these.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashkernel.blocks.expression import Table, score_function
from flashkernel.blocks.mask import custom
from flashkernel.compat.arguments import integer, optional_number, positive_softcap, window_sides
from flashkernel.ops.append_kv import append_kv
from flashkernel.ops.attention import attention
from flashkernel.ops.decode import decode_attention
from flashkernel.ops.rope import rope

NAME = "flash_attn_with_kvcache"
PAGE_SIZES = (256, 128, 64, 32, 16)  # that kernels have


class _Cache(NamedTuple):
    """The cache, and where each sequence's keys are in it."""

    k: Tensor
    v: Tensor
    batch_idx: Tensor | None
    block_table: Tensor | None
    leftpad: Tensor | None  # where its keys begin


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
    """flash_attn.flash_attn_with_kvcache: attention to a KV cache, to which k and v are appended first, in place.

    Query i sees key j where -left <= j - (i + keys - seqlen_q) <= right, (left, right) being window_size; causal is
    right = 0.

    Args:
        q: (batch, seqlen_q, heads, head_dim).
        k_cache: (batch_cache, seqlen_cache, heads_k, head_dim), or with `block_table` the pages
            (num_blocks, page_size, heads_k, head_dim); written in place where k and v are given.
        v_cache: as k_cache, with value_dim.
        k: (batch, seqlen_new, heads_k, head_dim), new keys; None appends nothing.
        v: (batch, seqlen_new, heads_k, value_dim), new values.
        rotary_cos: (positions, rotary_dim / 2). k and q are rotated by their positions from cache_seqlens on; without
            causal and windows, q is rotated by the first of them throughout.
        rotary_sin: as rotary_cos.
        cache_seqlens: keys in the cache before the call, a number or int32 (batch,); None is all of it.
        cache_batch_idx: (batch,), the cache's row of each sequence; None: sequence b is in row b.
        cache_leftpad: int32 (batch,), where each sequence's keys begin in its row; cache_seqlens counts from the row's
            start, rotary positions from there.
        block_table: int32 (batch, max_blocks), the page numbers of each sequence.
        softmax_scale: what Q K^T is multiplied by; None is 1 / sqrt(head_dim).
        causal: a query sees no key behind its own.
        window_size: (left, right), the keys a query sees before and behind its own; -1 is no limit.
        softcap: scores are softcap * tanh(score / softcap); 0 is none.
        rotary_interleaved: pairs are adjacent dims instead of the two halves of the rotated dims.
        alibi_slopes: (heads,) or (batch, heads), ALiBi's slopes.
        num_splits: accepted, not needed.
        return_softmax_lse: also return the LSE.

    Returns:
        out (batch, seqlen_q, heads, value_dim); with return_softmax_lse also lse float32 (batch, heads, seqlen_q).

    Example:
        >>> import torch
        >>> from flashkernel.compat.flash_attn import flash_attn_with_kvcache
        >>> k_cache, v_cache = torch.zeros(2, 128, 2, 64), torch.zeros(2, 128, 2, 64)
        >>> q, k, v = torch.randn(2, 1, 8, 64), torch.randn(2, 1, 2, 64), torch.randn(2, 1, 2, 64)
        >>> cache_seqlens = torch.tensor([5, 70], dtype=torch.int32)
        >>> flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=cache_seqlens, causal=True).shape
        torch.Size([2, 1, 8, 64])
    """
    if cache_batch_idx is not None and block_table is not None:
        raise ValueError(f"{NAME}: cache_batch_idx picks rows of a cache without pages; leave it or block_table out")
    batch, seqlen_q = q.shape[:2]
    sides = window_sides(NAME, window_size)
    if (rotary_cos is None) != (rotary_sin is None):
        raise ValueError(f"{NAME}: rotary_cos and rotary_sin come together; give both, or none")
    masked = bool(causal) or sides[0] >= 0 or sides[1] >= 0
    seqlens = _cache_seqlens(cache_seqlens, batch, k_cache, block_table, q.device)
    cache = _Cache(k_cache, v_cache, cache_batch_idx, block_table, _leftpad(cache_leftpad, batch, q.device))
    if k is None or v is None:
        if k is not None or v is not None or rotary_cos is not None:
            raise ValueError(f"{NAME}: k and v come together, and rotary_cos only with them; give both, or none")
    else:
        if cache_seqlens is None:
            raise ValueError(f"{NAME}: cache_seqlens is missing; it says where the new k and v go")
        angles: dict[str, Any] = {}
        if rotary_cos is not None and rotary_sin is not None:
            angles = {"cos": rotary_cos, "sin": rotary_sin, "interleaved": bool(rotary_interleaved)}
        q = _append(q, k, v, cache, seqlens, angles, masked)
        seqlens = seqlens + k.shape[1]
    softcap, scale = positive_softcap(NAME, softcap), optional_number(NAME, "softmax_scale", softmax_scale)
    later = seqlen_q > 1 and not causal and sides[1] != 0 and max(sides) >= 0  # than a query's own: keys that it sees
    if later or cache_leftpad is not None or alibi_slopes is not None:
        out, lse = _attend_copy(q, cache, seqlens, (sides[0], 0 if causal else sides[1]), alibi_slopes, scale, softcap)
        return (out, lse) if return_softmax_lse else out
    if cache_batch_idx is not None:
        k_cache, v_cache, block_table = _rows_as_pages(k_cache, v_cache, cache_batch_idx)
    elif block_table is None:
        k_cache, v_cache = k_cache[:batch], v_cache[:batch]  # sequence b is in row b
    else:
        k_cache, v_cache, block_table = _smaller_pages(k_cache, v_cache, block_table)
    window = None if sides[0] < 0 else sides[0] + 1  # flash-attn does not count a query's own key
    packed = seqlen_q > 1 and not masked  # every query sees every key: queries are so many more heads of a group
    rows = _pack_queries(q, k_cache.shape[2]) if packed else q
    out, lse = decode_attention(
        rows, k_cache, v_cache, seqlens, block_table, window=window, softcap=softcap, scale=scale, return_lse=True
    )
    if packed:
        out, lse = _unpack_queries(out, seqlen_q, k_cache.shape[2]), lse.view(batch, -1, seqlen_q)
    return (out, lse) if return_softmax_lse else out


def _cache_seqlens(
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


def _leftpad(given: Tensor | None, batch: int, device: torch.device) -> Tensor | None:
    if given is None:
        return None
    if not isinstance(given, Tensor) or given.shape != (batch,) or given.is_floating_point():
        described = f"{given.dtype} {tuple(given.shape)}" if isinstance(given, Tensor) else repr(given)
        raise ValueError(f"{NAME}: cache_leftpad is {described}; it must be int32 ({batch},)")
    return given.to(device, torch.int32)


def _append(
    q: Tensor, k: Tensor, v: Tensor, cache: _Cache, seqlens: Tensor, angles: dict[str, Any], masked: bool
) -> Tensor:
    """Writes k and v behind each sequence's last key, rotated where there are angles; returns q, rotated likewise."""
    seqlen_new = k.shape[1]
    position = seqlens[:, None] + torch.arange(seqlen_new, dtype=torch.int32, device=k.device)  # [batch, seqlen_new]
    write = partial(append_kv, k.flatten(0, 1), v.flatten(0, 1), cache.k, cache.v, _slots(position, cache).flatten())
    if cache.leftpad is not None:  # angles count from a sequence's first key
        seqlens, position = seqlens - cache.leftpad, position - cache.leftpad[:, None]
    if not angles:
        write()
        return q
    if masked and q.shape[1] == seqlen_new:
        rotated = write(q=q.flatten(0, 1), positions=position.flatten(), **angles)
        assert rotated is not None
        return rotated.view(q.shape)
    write(positions=position.flatten(), **angles)
    steps = torch.arange(q.shape[1], dtype=torch.int32, device=q.device) * int(masked)
    rotated_q = rope(q, positions=seqlens[:, None] + steps, **angles)
    assert isinstance(rotated_q, Tensor)
    return rotated_q


def _slots(position: Tensor, cache: _Cache) -> Tensor:
    """The slot of each position [batch, n] in the cache, int64; -1 beyond its end."""
    size = cache.k.shape[1]
    if cache.block_table is None:
        batch = torch.arange(position.shape[0], device=position.device)
        row = batch if cache.batch_idx is None else cache.batch_idx.long()
        return torch.where(position < size, row[:, None] * size + position, -1)
    max_blocks = cache.block_table.shape[1]
    page = cache.block_table.long().gather(1, (position // size).clamp(max=max_blocks - 1).long())
    return torch.where(position < max_blocks * size, page * size + position % size, -1)


def _attend_copy(
    q: Tensor, cache: _Cache, seqlens: Tensor, window: tuple[int, int], slopes: Tensor | None, scale: float | None,
    softcap: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) by `attention` over a copy of the sequences' rows, in which keys that nobody wrote are zeros."""
    batch, seqlen_q, heads, _ = q.shape
    k, v = (_copied_rows(x, cache, batch) for x in (cache.k, cache.v))
    capacity = k.shape[1]
    end = seqlens.clamp(max=capacity)
    begin = torch.zeros_like(end) if cache.leftpad is None else cache.leftpad
    key = torch.arange(capacity, dtype=torch.int32, device=q.device)
    written = ((begin[:, None] <= key) & (key < end[:, None]))[:, :, None, None]
    k, v = torch.where(written, k, 0), torch.where(written, v, 0)
    own = end - seqlen_q  # the key that query 0 is aligned with
    first, last = Table(begin), Table(end)
    aligned = Table(own)
    mask = custom(lambda b, h, i, j: (first[b] <= j) & (j < last[b]), "cache")
    left, right = (min(side, capacity + seqlen_q) for side in window)
    if left >= 0:
        mask = mask & custom(lambda b, h, i, j: aligned[b] + i - left <= j, "left")
    if right >= 0:
        mask = mask & custom(lambda b, h, i, j: j <= aligned[b] + i + right, "right")
    score = None
    if slopes is not None:
        if tuple(slopes.shape) not in ((heads,), (batch, heads)):
            raise ValueError(
                f"{NAME}: alibi_slopes has shape {tuple(slopes.shape)}; it must be ({heads},) or ({batch}, {heads})"
            )
        slope = Table(slopes.detach().float().expand(batch, heads))
        score = score_function(lambda s, b, h, i, j: s - slope[b, h] * abs(aligned[b] + i - j))
    return attention(q, k, v, mask=mask, score=score, scale=scale, softcap=softcap, return_lse=True)  # type: ignore[return-value]


def _copied_rows(x: Tensor, cache: _Cache, batch: int) -> Tensor:
    """Each sequence's keys or values, (batch, capacity, heads_k, dim)."""
    if cache.block_table is not None:
        pages = cache.block_table.long().clamp(0, max(0, x.shape[0] - 1))  # behind the last key they may be anything
        return x[pages].flatten(1, 2)
    return x[:batch] if cache.batch_idx is None else x[cache.batch_idx.long()]


def _rows_as_pages(k: Tensor, v: Tensor, batch_idx: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of a cache as pages and their table, so that they are read where they are; copied where they cannot be."""
    capacity = k.shape[1]
    size = _divisor(k, v)
    if size == 0:
        size = next(size for size in PAGE_SIZES if capacity >= size or size == 16)
        row, short = batch_idx.long(), -capacity % size
        k, v = (torch.nn.functional.pad(cache[row], (0, 0, 0, 0, 0, short)) for cache in (k, v))
        batch_idx = torch.arange(batch_idx.shape[0], device=k.device)
    return _divided(k, v, batch_idx.to(torch.int32)[:, None], size)


def _smaller_pages(k: Tensor, v: Tensor, block_table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pages of a size that kernels do not have as several of one that they have, where they lie so in memory."""
    if k.shape[1] in PAGE_SIZES or block_table.ndim != 2:
        return k, v, block_table
    size = _divisor(k, v)
    return _divided(k, v, block_table, size) if size else (k, v, block_table)


def _divisor(k: Tensor, v: Tensor) -> int:
    """The largest size of pages into which rows of a cache are divided where they lie; 0 if there is none."""
    capacity = k.shape[1]
    if any(cache.shape[0] > 1 and cache.stride(0) != capacity * cache.stride(1) for cache in (k, v)):
        return 0
    return next((size for size in PAGE_SIZES if capacity % size == 0), 0)


def _divided(k: Tensor, v: Tensor, rows: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """The cache as pages of `size` keys, and the table of those of the rows int32 [batch, n] of each sequence."""
    each = k.shape[1] // size
    table = rows[:, :, None] * each + torch.arange(each, dtype=torch.int32, device=k.device)
    k_pages, v_pages = (cache.view(cache.shape[0] * each, size, *cache.shape[2:]) for cache in (k, v))
    return k_pages, v_pages, table.flatten(1)


def _pack_queries(q: Tensor, kv_heads: int) -> Tensor:
    """(batch, seqlen_q, heads, dim) -> (batch, 1, heads * seqlen_q, dim): queries join the heads of a group."""
    batch, seqlen_q, heads, dim = q.shape
    by_group = q.view(batch, seqlen_q, kv_heads, heads // kv_heads, dim).permute(0, 2, 3, 1, 4)
    return by_group.reshape(batch, 1, heads * seqlen_q, dim)


def _unpack_queries(out: Tensor, seqlen_q: int, kv_heads: int) -> Tensor:
    batch, _, rows, dim = out.shape
    by_group = out.view(batch, kv_heads, rows // (kv_heads * seqlen_q), seqlen_q, dim)
    return by_group.permute(0, 3, 1, 2, 4).reshape(batch, seqlen_q, rows // seqlen_q, dim)
