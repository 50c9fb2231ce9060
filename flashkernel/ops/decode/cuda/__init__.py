"""Launchers of the CUDA C++ decoding kernels: from Turing (sm_75) up."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from flashkernel.blocks.cuda_headers import CUDA_HEADERS
from flashkernel.core import cuda, device, tune
from flashkernel.core.cuda import Kernel, Module
from flashkernel.core.launch import pdl_options
from flashkernel.ops.decode.configs import SHORT
from flashkernel.ops.decode.cuda.configs import PREFILL, SPLIT, PrefillConfig, SplitConfig, block_m, padded_dim
from flashkernel.ops.decode.params import CachedKV, DecodeParams

FOLDER = Path(__file__).parent
DECODE = Module(FOLDER / "split_kv.cu", include=CUDA_HEADERS)
PAGED = Module(FOLDER / "prefill.cu", include=CUDA_HEADERS)
TYPES = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
STORED = {**TYPES, torch.int8: "signed char", torch.float8_e4m3fn: "unsigned char"}
SINKS = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}  # as in attend.cuh
MAX_ROW_STRIDE = 2**26  # bytes; 16 rows of it are stepped over with 32-bit numbers
CONTIGUOUS = 31  # page_shift of a cache that is not paged: all keys lie in one page

_CACHE = "int64, int32, int64, int64, int32, int64, int64, int32, int64"  # strides of k, v, the scales, the page table
_ARGUMENTS = {
    "decode_split_kv": (
        f"{', '.join(['pointer'] * 11)}, int64, int64, int64, {_CACHE}, {', '.join(['int32'] * 13)}, "
        "float32, float32, int32"
    ),
    "decode_combine": f"pointer, pointer, pointer, pointer, {', '.join(['int32'] * 9)}",
    "paged_prefill": (
        f"{', '.join(['pointer'] * 11)}, int64, int64, {_CACHE}, {', '.join(['int32'] * 11)}, float32, float32"
    ),
}  # fmt: skip


@lru_cache(maxsize=1024)
def _kernel(name: str, *parameters: str | int) -> Kernel:
    """An instance of a template: _kernel("decode_combine", "__half", 128, 16)."""
    module = PAGED if name == "paged_prefill" else DECODE
    return module.kernel(f"{name}<{', '.join(map(str, parameters))}>", _ARGUMENTS[name])


def forward(q: Tensor, cache: CachedKV, sinks: Tensor | None, params: DecodeParams) -> tuple[Tensor, Tensor]:
    """(o, lse): o is (batch, seqlen_q, heads, value_dim) in q's dtype, lse (batch, heads, seqlen_q) in float32.

    A shared prefix changes nothing: every sequence has its keys, and reads them itself.
    """
    batch, seqlen_q, heads, head_dim = q.shape
    kv_heads, value_dim = cache.k.shape[2], cache.v.shape[3]
    o = torch.empty((batch, seqlen_q, heads, value_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, seqlen_q), dtype=torch.float32, device=q.device)
    if lse.numel() == 0:
        return o, lse
    q, k, v = _vectorized(q), _vectorized(cache.k), _vectorized(cache.v)
    gpu, dim, group_size = cuda.target(q.device), padded_dim(head_dim, value_dim), heads // kv_heads
    rows = block_m(gpu, dim, seqlen_q * group_size, k.element_size())
    shape = {"dim": dim, "block_m": rows, "cache_bytes": k.element_size()}
    config: SplitConfig = tune.pick(SPLIT, gpu, shape)
    row_tiles = tune.ceil_div(seqlen_q * group_size, rows)
    work_tiles = batch * kv_heads * row_tiles
    visible_keys = params.visible_keys(cache.capacity, seqlen_q)
    split = visible_keys > SHORT
    blocks = work_tiles * (tune.ceil_div(visible_keys, config.block_n) + 1)
    programs = min(config.programs_per_sm * gpu.sms, blocks) if split else work_tiles
    workspace, sink_type, sinks = None, *_sinks(sinks)
    if split:  # two slots per program of O, row max and row sum; two integers per work tile
        elements = 2 * programs * rows * (dim + 2) + 2 * work_tiles
        workspace = torch.empty(elements, dtype=torch.float32, device=q.device)
    pdl = pdl_options(device.properties(q.device))["PDL"]
    _kernel(
        "decode_split_kv", TYPES[q.dtype], STORED[k.dtype], dim, rows // 16, config.num_warps, config.keys,
        config.num_stages,
    ).launch(
        programs, 32 * config.num_warps,
        (
            q, k, v, cache.k_scale, cache.v_scale, cache.seqlens, cache.page_table, sinks, o, lse, workspace,
            *q.stride()[:3], *_cache_strides(cache, k, v), batch, seqlen_q, heads, group_size, kv_heads, row_tiles,
            cache.capacity, head_dim, value_dim, _page_shift(cache), params.window, params.sink_tokens, sink_type,
            params.scale, params.softcap, int(split),
        ),
        config.shared_bytes(dim, rows, k.element_size()), q.device, pdl,
    )  # fmt: skip
    if split:
        used = min(rows, seqlen_q * group_size)
        rows_per_block = 1 if work_tiles * used <= 8 * gpu.sms else used
        _kernel("decode_combine", TYPES[q.dtype], dim, rows).launch(
            (work_tiles, tune.ceil_div(used, rows_per_block)), 128,
            (
                workspace, sinks, o, lse, programs, seqlen_q, heads, group_size, kv_heads, row_tiles, value_dim,
                sink_type, rows_per_block,
            ),
            0, q.device, pdl,
        )  # fmt: skip
    return o, lse


def forward_packed(
    q: Tensor, cu_seqlens_q: Tensor, cache: CachedKV, sinks: Tensor | None, params: DecodeParams
) -> tuple[Tensor, Tensor]:
    """(o, lse) of packed queries (tokens, heads, head_dim): o (tokens, heads, value_dim), lse (heads, tokens)."""
    tokens, heads, head_dim = q.shape
    kv_heads, value_dim, batch = cache.k.shape[2], cache.v.shape[3], cache.seqlens.shape[0]
    o = torch.empty((tokens, heads, value_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((heads, tokens), dtype=torch.float32, device=q.device)
    if lse.numel() == 0:
        return o, lse
    q, k, v = _vectorized(q), _vectorized(cache.k), _vectorized(cache.v)
    gpu, dim, group_size = cuda.target(q.device), padded_dim(head_dim, value_dim), heads // kv_heads
    config: PrefillConfig = tune.pick(PREFILL, gpu, {"dim": dim, "cache_bytes": k.element_size()})
    # Every sequence may leave a tile unfilled, and so may the tokens behind the last one.
    tiles = tune.ceil_div(tokens * group_size, config.block_m) + min(batch + 1, tokens)
    sink_type, sinks = _sinks(sinks)
    _kernel(
        "paged_prefill", TYPES[q.dtype], STORED[k.dtype], dim, config.num_warps, config.block_n
    ).launch(
        (tiles, kv_heads), 32 * config.num_warps,
        (
            q, k, v, cache.k_scale, cache.v_scale, cu_seqlens_q, cache.seqlens, cache.page_table, sinks, o, lse,
            *q.stride()[:2], *_cache_strides(cache, k, v), batch, tokens, heads, group_size, cache.capacity, head_dim,
            value_dim, _page_shift(cache), params.window, params.sink_tokens, sink_type, params.scale, params.softcap,
        ),
        config.shared_bytes(dim, k.element_size()), q.device, pdl_options(device.properties(q.device))["PDL"],
    )  # fmt: skip
    return o, lse


def _vectorized(x: Tensor) -> Tensor:
    """The tensor, copied where 16-byte loads cannot read its rows. Of a cache dispatch declines this where it can see
    the address."""
    if x.stride(1) * x.element_size() >= MAX_ROW_STRIDE:
        return x.clone(memory_format=torch.contiguous_format)
    return cuda.vectorized(x)


def _sinks(sinks: Tensor | None) -> tuple[int, Tensor | None]:
    """(type, sinks) as load_sink in attend.cuh takes them."""
    if sinks is None:
        return 0, None
    sinks = sinks if sinks.dtype in SINKS else sinks.float()
    return SINKS[sinks.dtype], sinks


def _cache_strides(cache: CachedKV, k: Tensor, v: Tensor) -> tuple[int, ...]:
    """Strides of pages, keys and heads of k and v in bytes; of pages and keys of the scales, and of the page table's
    rows, in elements."""
    size = k.element_size()
    scale = (0, 0) if cache.k_scale is None else cache.k_scale.stride()[:2]
    table = 0 if cache.page_table is None else cache.page_table.stride(0)
    return (*(size * stride for x in (k, v) for stride in x.stride()[:3]), *scale, table)


def _page_shift(cache: CachedKV) -> int:
    return cache.page_size.bit_length() - 1 if cache.page_size else CONTIGUOUS
