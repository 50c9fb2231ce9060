"""Attention of few queries to cached keys on a CPU, by the C++ kernels of blocks/cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from flashkernel.blocks.decode_cpp import AttendCall
from flashkernel.ops.decode.params import CachedKV, DecodeParams


def forward(q: Tensor, cache: CachedKV, sinks: Tensor | None, params: DecodeParams) -> tuple[Tensor, Tensor]:
    if q.is_meta:  # no memory to read
        lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
        return q.new_empty((*q.shape[:3], cache.v.shape[3])), lse
    lse = torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32, device="cpu")
    if cache.page_table is not None:
        _check_pages(cache.page_table, cache.seqlens, cache.k)
    call = AttendCall(cache.seqlens, cache.page_table, params.scale, params.softcap, params.sink_tokens)
    sinks = None if sinks is None else sinks.float()
    return call(q, cache.k, cache.v, params.window, sinks, cache.k_scale, cache.v_scale, lse), lse


def _check_pages(page_table: Tensor, seqlens: Tensor, k: Tensor) -> None:
    """IndexError for a page that is not there: the kernels would read beyond the cache."""
    pages, page_size = k.shape[:2]
    used = torch.arange(0, page_table.shape[1] * page_size, page_size, device="cpu") < seqlens[:, None]
    found = torch.where(used, page_table, 0)
    if found.numel() and not (int(found.min()) >= 0 and int(found.max()) < pages):
        wrong = found[(found < 0) | (found >= pages)][0]
        raise IndexError(f"decode_attention: page_table names page {int(wrong)}; the cache has pages 0 to {pages - 1}")
