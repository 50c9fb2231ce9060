"""The decode kernels as torch operators; they have no gradients."""

import torch
from torch import Tensor

from flashkernel.core.arguments import unit_stride
from flashkernel.core.library import KernelOp
from flashkernel.core.op import resolve
from flashkernel.ops.decode.params import CachedKV, DecodeParams


def _dense(cache: CachedKV) -> CachedKV:
    """The cache as kernels read it: unit strides, float32 scales."""
    scales = [None if x is None else x.float().contiguous() for x in (cache.k_scale, cache.v_scale)]
    page_table = None if cache.page_table is None else unit_stride(cache.page_table)
    return CachedKV(unit_stride(cache.k), unit_stride(cache.v), cache.seqlens.contiguous(), page_table, *scales)


def _decode_forward(
    q: Tensor, cache: CachedKV, sinks: Tensor | None, params: DecodeParams, kernels: str
) -> tuple[Tensor, Tensor]:
    given, prefix = _dense(cache), params.prefix
    if params.window:
        prefix = 0
    elif not isinstance(prefix, Tensor):
        prefix = min(prefix, given.capacity)
    if prefix is not params.prefix:
        params = params._replace(prefix=prefix)
    return resolve(kernels).forward(unit_stride(q), given, None if sinks is None else sinks.contiguous(), params)


def _fake_decode(q, cache, sinks, params, kernels):
    batch, seqlen_q, heads, _ = q.shape
    out = q.new_empty((batch, seqlen_q, heads, cache.v.shape[3]))
    return out, q.new_empty((batch, heads, seqlen_q), dtype=torch.float32)


def _packed_forward(
    q: Tensor, cu_seqlens_q: Tensor, cache: CachedKV, sinks: Tensor | None, params: DecodeParams, kernels: str
) -> tuple[Tensor, Tensor]:
    sinks = None if sinks is None else sinks.contiguous()
    return resolve(kernels).forward_packed(unit_stride(q), cu_seqlens_q.contiguous(), _dense(cache), sinks, params)


def _fake_packed(q, cu_seqlens_q, cache, sinks, params, kernels):
    tokens, heads, _ = q.shape
    return q.new_empty((tokens, heads, cache.v.shape[3])), q.new_empty((heads, tokens), dtype=torch.float32)


decode_attention = KernelOp("decode_attention", _decode_forward, _fake_decode)
paged_attention = KernelOp("paged_attention", _packed_forward, _fake_packed)
