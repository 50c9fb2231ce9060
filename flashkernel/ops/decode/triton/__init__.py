"""Launchers of the Triton decoding kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashkernel.core import device, tune
from flashkernel.core.launch import launch, pdl_options
from flashkernel.ops.decode.configs import COMBINE, PREFILL, SPLIT_KV, CombineConfig, PrefillConfig, SplitKVConfig
from flashkernel.ops.decode.kernel_args import (
    AttendConfig,
    Output,
    OutputConfig,
    Partials,
    QueryStrides,
    ScheduleConfig,
    Sizes,
)
from flashkernel.ops.decode.params import CachedKV, DecodeParams
from flashkernel.ops.decode.triton.prefill import paged_prefill
from flashkernel.ops.decode.triton.split_kv import decode_combine, decode_split_kv


@dataclass(frozen=True)
class Pass:
    """One pass over the cache: over each sequence's own keys, or (`prefix`) over those that all sequences share."""

    prefix: bool
    sinks: Tensor | None
    prefix_output: Output  # of an earlier pass over the shared prefix


def forward(q: Tensor, cache: CachedKV, sinks: Tensor | None, params: DecodeParams) -> tuple[Tensor, Tensor]:
    """(o, lse): o is (batch, seqlen_q, heads, value_dim) in q's dtype, lse (batch, heads, seqlen_q) in float32."""
    prefix_output = Output(None, None)
    if params.prefix_kind:
        prefix_output = _attend(q, cache, params, Pass(True, None, prefix_output), torch.float32)
    return tuple(_attend(q, cache, params, Pass(False, sinks, prefix_output), q.dtype))  # type: ignore[return-value]


def forward_packed(
    q: Tensor, cu_seqlens_q: Tensor, cache: CachedKV, sinks: Tensor | None, params: DecodeParams
) -> tuple[Tensor, Tensor]:
    """(o, lse) of packed queries (tokens, heads, head_dim): o (tokens, heads, value_dim), lse (heads, tokens)."""
    tokens, heads, _ = q.shape
    kv_heads, value_dim, batch = cache.k.shape[2], cache.v.shape[3], cache.seqlens.shape[0]
    group_size = heads // kv_heads
    o = torch.empty((tokens, heads, value_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((heads, tokens), dtype=torch.float32, device=q.device)
    shape = {"tokens": tokens, **_shape(q, cache, cache.capacity)}
    config: PrefillConfig = tune.pick(PREFILL, device.properties(q.device), shape)
    # Every sequence may leave a tile unfilled, and so may the tokens behind the last one.
    tiles = tune.ceil_div(tokens, config.block_m // group_size) + min(batch + 1, tokens)
    launch(
        paged_prefill, (tiles, kv_heads),
        q, cache.pointers, cu_seqlens_q, cache.seqlens, cache.page_table_words, sinks, Output(o, lse),
        QueryStrides(None, *q.stride()[:2]), cache.strides, batch, tokens, heads, cache.capacity,
        params.window_args, params.scale, params.softcap,
        GROUP_SIZE=group_size, BATCH=tune.power_of_2(batch + 1),
        ATTEND=_attend_config(q, cache, params, config.block_m, config.block_n, 1, config.num_stages),
        OUTPUT=_output_config(value_dim, sinks, Output(None, None)), num_warps=config.num_warps,
    )  # fmt: skip
    return o, lse


def _attend(q: Tensor, cache: CachedKV, params: DecodeParams, this: Pass, dtype: torch.dtype) -> Output:
    batch, seqlen_q, heads, _ = q.shape
    kv_heads, value_dim = cache.k.shape[2], cache.v.shape[3]
    group_size, gpu = heads // kv_heads, device.properties(q.device)
    o = torch.empty((batch, seqlen_q, heads, value_dim), dtype=dtype, device=q.device)
    lse = torch.empty((batch, heads, seqlen_q), dtype=torch.float32, device=q.device)
    sequences, queries = (min(batch, 1), batch * seqlen_q) if this.prefix else (batch, seqlen_q)
    visible_keys = params.visible_keys(cache.capacity, seqlen_q)
    shape = {"batch": sequences, "queries": queries, "kv_heads": kv_heads, **_shape(q, cache, visible_keys)}
    config: SplitKVConfig = tune.pick(SPLIT_KV, gpu, shape)
    rows = config.tile_kv_heads * queries * group_size
    row_tiles, head_groups = tune.ceil_div(rows, config.block_m), kv_heads // config.tile_kv_heads
    work_tiles = sequences * head_groups * row_tiles
    blocks = work_tiles * max(1, tune.ceil_div(visible_keys, config.block_n) + 1)
    programs = min(config.programs_per_sm * gpu.sms, blocks) if config.split_kv else work_tiles
    output = _output_config(value_dim, this.sinks, this.prefix_output)
    partials = empty_partials(q, 2 * programs if config.split_kv else 0, config.block_m, output.BLOCK_DV)
    sizes = Sizes(batch, seqlen_q, heads, group_size, head_groups, row_tiles, cache.capacity)
    schedule = ScheduleConfig(
        this.prefix, params.prefix_kind, params.window > 0, tune.power_of_2(sequences), config.block_m, config.block_n,
        config.tile_kv_heads,
    )  # fmt: skip
    pdl = pdl_options(gpu)
    launch(
        decode_split_kv, (programs,),
        q, cache.pointers, cache.seqlens, cache.page_table_words, this.sinks, this.prefix_output, Output(o, lse),
        partials, params.prefix, QueryStrides(*q.stride()[:3]), cache.strides, sizes, params.window_args, params.scale,
        params.softcap,
        SPLIT=config.split_kv, SCHEDULE=schedule,
        ATTEND=_attend_config(
            q, cache, params, config.block_m, config.block_n, config.tile_kv_heads, config.num_stages
        ),
        OUTPUT=output, OVERLAP=config.overlap_combine and config.split_kv, num_warps=config.num_warps, **pdl,
        **_max_registers(config, gpu),
    )  # fmt: skip
    if config.split_kv:
        rows = min(config.block_m, rows)
        combine = combine_config(gpu, work_tiles, rows, programs, value_dim)
        launch(
            decode_combine, (work_tiles, tune.ceil_div(rows, combine.block_m)),
            partials, cache.seqlens, this.sinks, this.prefix_output, Output(o, lse), params.prefix, sizes,
            params.window_args, programs,
            SCHEDULE=schedule, OUTPUT=output, BLOCK_SPLITS=combine.block_splits, BLOCK_ROWS=combine.block_m,
            num_warps=combine.num_warps, **pdl,
        )  # fmt: skip
    return Output(o, lse)


def empty_partials(q: Tensor, slots: int, block_m: int, block_dv: int) -> Partials:
    """Memory for the partial results of `slots` ranges of K blocks."""
    o = torch.empty((slots, block_m, block_dv), dtype=torch.float32, device=q.device)
    return Partials(o, torch.empty((slots, 2, block_m), dtype=torch.float32, device=q.device))


def combine_config(gpu: device.Device, work_tiles: int, rows: int, programs: int, value_dim: int) -> CombineConfig:
    """The launch config of the combine kernel."""
    shape = {"work_tiles": work_tiles, "rows": rows, "programs": programs, "value_dim": value_dim}
    return tune.pick(COMBINE, gpu, shape)  # type: ignore[no-any-return]


def _max_registers(config: SplitKVConfig, gpu: device.Device) -> dict[str, int]:
    """A bound on a thread's registers where all programs must be resident at once, and the compiler might take more."""
    if not config.split_kv or gpu.kind != "cuda":
        return {}
    each = gpu.registers_per_sm // (config.programs_per_sm * config.num_warps * 32) // 8 * 8
    return {"maxnreg": each} if each < 255 else {}


def _shape(q: Tensor, cache: CachedKV, visible_keys: int) -> dict[str, int]:
    """What the launch configs of both kernels depend on."""
    return {
        "group_size": q.shape[-2] // cache.k.shape[2], "visible_keys": visible_keys, "page_size": cache.page_size,
        "head_dim": q.shape[-1], "value_dim": cache.v.shape[3], "cache_bytes": cache.k.element_size(),
        "q_bytes": q.element_size(),
    }  # fmt: skip


def _attend_config(
    q: Tensor, cache: CachedKV, params: DecodeParams, block_m: int, block_n: int, tile_kv_heads: int, num_stages: int
) -> AttendConfig:
    ieee = q.dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32
    head_dim, value_dim = q.shape[-1], cache.v.shape[3]
    return AttendConfig(
        params.window > 0, params.softcap > 0, cache.k_scale is not None, cache.page_size, "ieee" if ieee else "tf32",
        head_dim, value_dim, max(16, tune.power_of_2(head_dim)), max(16, tune.power_of_2(value_dim)),
        block_m, block_n, tile_kv_heads, num_stages,
    )  # fmt: skip


def _output_config(value_dim: int, sinks: Tensor | None, prefix_output: Any) -> OutputConfig:
    block_dv = max(16, tune.power_of_2(value_dim))
    return OutputConfig(sinks is not None, prefix_output.o is not None, value_dim, block_dv)
