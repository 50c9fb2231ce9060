"""Attention of few queries to cached keys on a CPU, by the C++ kernels of blocks/cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from flashkernel.blocks.decode_cpp import AttendCall
from flashkernel.ops.decode.params import CachedKV, DecodeParams


def forward(q: Tensor, cache: CachedKV, sinks: Tensor | None, params: DecodeParams) -> tuple[Tensor, Tensor]:
    lse = torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    call = AttendCall(cache.seqlens, cache.page_table, params.scale, params.softcap, params.sink_tokens)
    sinks = None if sinks is None else sinks.float()
    return call(q, cache.k, cache.v, params.window, sinks, cache.k_scale, cache.v_scale, lse), lse
