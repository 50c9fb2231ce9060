"""The decode kernels as torch operators; they have no gradients."""

import torch
from torch import Tensor

from flashkernel.core.arguments import unit_stride
from flashkernel.core.library import KernelOp
from flashkernel.core.op import resolve
from flashkernel.ops.decode.params import CachedKV, DecodeParams


def _cached(k, v, lengths, page_table, k_scale, v_scale) -> CachedKV:
    scales = [None if x is None else x.float().contiguous() for x in (k_scale, v_scale)]
    page_table = None if page_table is None else unit_stride(page_table)
    return CachedKV(unit_stride(k), unit_stride(v), lengths.contiguous(), page_table, *scales)


def _decode_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    page_table: Tensor | None,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    prefix: Tensor | None,
    prefix_length: int,
    window: int,
    sink_tokens: int,
    scale: float,
    softcap: float,
    kernels: str,
) -> tuple[Tensor, Tensor]:
    cache = _cached(k, v, lengths, page_table, k_scale, v_scale)
    shared = min(prefix_length, cache.capacity) if prefix is None else prefix
    params = DecodeParams(window, sink_tokens, scale, softcap, 0 if window else shared)
    return resolve(kernels).forward(unit_stride(q), cache, None if sinks is None else sinks.contiguous(), params)


def _fake_decode(q, k, v, *_):
    batch, seqlen_q, heads, _ = q.shape
    return q.new_empty((batch, seqlen_q, heads, v.shape[3])), q.new_empty((batch, heads, seqlen_q), dtype=torch.float32)


def _packed_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    lengths: Tensor,
    page_table: Tensor,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    window: int,
    sink_tokens: int,
    scale: float,
    softcap: float,
    kernels: str,
) -> tuple[Tensor, Tensor]:
    cache = _cached(k, v, lengths, page_table, k_scale, v_scale)
    params = DecodeParams(window, sink_tokens, scale, softcap)
    sinks = None if sinks is None else sinks.contiguous()
    return resolve(kernels).forward_packed(unit_stride(q), cu_seqlens_q.contiguous(), cache, sinks, params)


def _fake_packed(q, k, v, *_):
    tokens, heads, _ = q.shape
    return q.new_empty((tokens, heads, v.shape[3])), q.new_empty((heads, tokens), dtype=torch.float32)


decode_attention = KernelOp("decode_attention", _decode_forward, _fake_decode)
paged_attention = KernelOp("paged_attention", _packed_forward, _fake_packed)
