"""Sizes of attention's test and benchmark cases, and how much there is to compute in them."""

from __future__ import annotations

from typing import Any

import torch

from flashkernel.blocks import expression as ex
from flashkernel.blocks.mask import EMPTY, FULL, Mask
from flashkernel.core.op import Axes


def axes_of(
    batch: int, lengths: int | tuple[int, int], heads: int | tuple[int, int], dims: int | tuple[int, int], **more: Any
) -> Axes:
    """Sizes of a case; a pair is (queries, keys), (query heads, key and value heads), (head_dim, value_dim)."""
    queries, keys = lengths if isinstance(lengths, tuple) else (lengths, lengths)
    query_heads, kv_heads = heads if isinstance(heads, tuple) else (heads, heads)
    head_dim, value_dim = dims if isinstance(dims, tuple) else (dims, dims)
    return {
        "batch": batch, "queries": queries, "keys": keys, "heads": query_heads, "kv_heads": kv_heads,
        "head_dim": head_dim, "value_dim": value_dim, **more,
    }  # fmt: skip


def visible_pairs(mask: Mask | None, batch: int, heads: int, queries: int, keys: int) -> int:
    """Pairs that are seen, over all batches and heads; only tiles that are partly visible are looked into."""
    if mask is None:
        return batch * heads * queries * keys
    tile = 128
    status = mask.tiles(batch, heads, queries, keys, tile, tile)
    repeats = (batch // max(1, status.shape[0])) * (heads // max(1, status.shape[1]))
    seen = int((status == FULL).sum()) * tile * tile
    if queries % tile:  # a full tile may stick out beyond the last query, though not beyond the last key
        seen -= int((status[:, :, -1] == FULL).sum()) * (tile - queries % tile) * tile
    partial = ((status != FULL) & (status != EMPTY)).nonzero()  # [tiles, 4]
    b, h = (partial[:, dim].view(-1, 1, 1) for dim in (0, 1))
    within = torch.arange(tile, device="cpu")
    for chunk in range(0, len(partial), 256):
        part = slice(chunk, chunk + 256)
        q = partial[part, 2].view(-1, 1, 1) * tile + within.view(1, -1, 1)
        k = partial[part, 3].view(-1, 1, 1) * tile + within.view(1, 1, -1)
        values = {"b": b[part], "h": h[part], "q": q, "k": k, "sq": queries, "sk": keys}
        seen += int(
            (torch.as_tensor(ex.evaluate(mask.expression, values), device="cpu") & (q < queries) & (k < keys)).sum()
        )
    return seen * repeats
