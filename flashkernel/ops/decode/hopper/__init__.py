"""Launcher of the Hopper decoding kernel."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flashkernel.core import device, tune
from flashkernel.core.gluon import descriptor_fields, gl, make_descriptor
from flashkernel.core.launch import launch, pdl_options
from flashkernel.core.tune import head_block
from flashkernel.ops.decode.configs import HOPPER, HopperConfig
from flashkernel.ops.decode.hopper.split_kv import decode_split_kv_hopper
from flashkernel.ops.decode.kernel_args import (
    AttendConfig,
    Output,
    OutputConfig,
    QueryStrides,
    ScheduleConfig,
    Sizes,
)
from flashkernel.ops.decode.params import CachedKV, DecodeParams
from flashkernel.ops.decode.triton import combine_config, empty_partials
from flashkernel.ops.decode.triton.split_kv import decode_combine

PRODUCER_REGISTERS = 40


def forward(q: Tensor, cache: CachedKV, sinks: Tensor | None, params: DecodeParams) -> tuple[Tensor, Tensor]:
    """(o, lse): o is (batch, seqlen_q, heads, value_dim) in q's dtype, lse (batch, heads, seqlen_q) in float32."""
    batch, seqlen_q, heads, head_dim = q.shape
    kv_heads = cache.k.shape[2]
    group_size, gpu = heads // kv_heads, device.properties(q.device)
    o = torch.empty((batch, seqlen_q, heads, head_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, seqlen_q), dtype=torch.float32, device=q.device)
    if o.numel() == 0:
        return o, lse
    if cache.k.numel() == 0:  # nothing is visible, and a descriptor of nothing is not allowed
        empty_lse = lse.new_full((heads,), float("-inf")) if sinks is None else sinks.float()
        return o.zero_(), lse.copy_(empty_lse.view(1, -1, 1))
    visible_keys = params.visible_keys(cache.capacity, seqlen_q)
    shape = {
        "batch": batch, "rows": seqlen_q * group_size, "kv_heads": kv_heads, "head_dim": head_dim,
        "page_size": cache.page_size, "visible_keys": visible_keys,
    }  # fmt: skip
    config: HopperConfig = tune.pick(HOPPER, gpu, shape)
    blocks = batch * kv_heads * (tune.ceil_div(visible_keys, config.block_n) + 1)
    programs = min(config.programs_per_sm * gpu.sms, blocks)
    block_m, block_d = tune.power_of_2(seqlen_q * group_size), head_block(head_dim)
    partials = empty_partials(q, 2 * programs, block_m, block_d)
    pdl = pdl_options(gpu)
    schedule = ScheduleConfig(False, 0, params.window > 0, tune.power_of_2(batch), block_m, config.block_n, 1)
    attend = AttendConfig(
        schedule.WINDOWED, params.softcap > 0, False, cache.page_size, "tf32", head_dim, head_dim, block_d, block_d,
        block_m, config.block_n, 1, config.num_stages,
    )  # fmt: skip
    output = OutputConfig(sinks is not None, False, head_dim, block_d)
    box_rows = min(cache.page_size or config.block_n, config.block_n)
    launch(
        decode_split_kv_hopper, (programs,),
        q, _boxes(cache.k, box_rows), _boxes(cache.v, box_rows), cache.seqlens, cache.page_table, sinks, Output(o, lse),
        partials, QueryStrides(*q.stride()[:3]), 0 if cache.page_table is None else cache.page_table.stride(0),
        batch, seqlen_q, heads, group_size, kv_heads, cache.capacity, params.window, params.sink_tokens, params.scale,
        params.softcap,
        SCHEDULE=schedule, ATTEND=attend, OUTPUT=output, PRODUCER_REGISTERS=PRODUCER_REGISTERS, num_warps=4,
        maxnreg=_max_registers(config, head_dim), **pdl,
    )  # fmt: skip
    combine = combine_config(gpu, batch * kv_heads, seqlen_q * group_size, programs, head_dim)
    launch(
        decode_combine, (batch * kv_heads, tune.ceil_div(seqlen_q * group_size, combine.block_m)),
        partials, cache.seqlens, sinks, Output(None, None), Output(o, lse), 0,
        Sizes(batch, seqlen_q, heads, group_size, kv_heads, 1, cache.capacity), params.window_args, programs,
        SCHEDULE=schedule, OUTPUT=output,
        BLOCK_SPLITS=combine.block_splits, BLOCK_ROWS=combine.block_m, num_warps=combine.num_warps, **pdl,
    )  # fmt: skip
    return o, lse


def _max_registers(config: HopperConfig, head_dim: int) -> int:
    """Registers per thread at the launch: the consumers take what the producers leave of them."""
    return 128 if config.programs_per_sm > 1 else 144 if head_dim <= 128 else 168


def _boxes(x: Tensor, rows: int) -> Any:
    """A tensor descriptor of K or V, in boxes of `rows` keys of one head and 64 columns; outside it reads zeros."""
    if x.data_ptr() % 16:  # dispatch declines this where it can see the address
        x = x.clone(memory_format=torch.contiguous_format)
    # A stride along one element is never taken, but must be a legal one.
    strides = [stride if size > 1 else x.shape[3] for size, stride in zip(x.shape, x.stride())]
    strides[3] = 1
    return make_descriptor(_fields(rows, x.dtype), x, x.shape, strides)


@lru_cache(maxsize=64)
def _fields(rows: int, dtype: torch.dtype) -> dict[str, Any]:
    """What the descriptors of such boxes have in common."""
    box = [1, rows, 1, 64]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    return descriptor_fields(torch.empty(box, dtype=dtype, device="meta"), box, layout)
