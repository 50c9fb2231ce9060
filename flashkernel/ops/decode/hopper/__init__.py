"""Launcher of the Hopper decoding kernel."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flashkernel.core import device, tune
from flashkernel.core.gluon import described, fields_of, gl
from flashkernel.core.launch import launch, pdl_options
from flashkernel.ops.decode.configs import COMBINE, RING, Ring, block
from flashkernel.ops.decode.hopper.kernels import decode_stream
from flashkernel.ops.decode.triton import Cache, Settings
from flashkernel.ops.decode.triton.kernels import decode_combine

__all__ = ["Cache", "Settings", "forward"]

LOADER_REGISTERS = 40


def forward(q: Tensor, cache: Cache, sinks: Tensor | None, settings: Settings) -> tuple[Tensor, Tensor]:
    """(o, lse): o is (batch, new, heads, value_dim) in q's dtype, lse (batch, heads, new) in float32."""
    batch, queries, heads, width = q.shape
    kv_heads = cache.k.shape[2]
    group, facts = heads // kv_heads, device.facts(q.device)
    o = torch.empty((batch, queries, heads, width), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, queries), dtype=torch.float32, device=q.device)
    if o.numel() == 0:
        return o, lse
    if cache.k.numel() == 0:  # nothing is seen, and a descriptor of nothing is not allowed
        nothing = lse.new_full((heads,), float("-inf")) if sinks is None else sinks.float()
        return o.zero_(), lse.copy_(nothing.view(1, -1, 1))
    span = min(cache.capacity, settings.window + queries - 1 + settings.sink_tokens)
    shape = {
        "batch": batch, "rows": queries * group, "kv_heads": kv_heads, "head_dim": width, "page": cache.page,
        "span": span if settings.window else cache.capacity,
    }  # fmt: skip
    config: Ring = tune.pick(RING, facts, shape)
    programs = min(config.per_sm * facts.sms, batch * kv_heads * (tune.ceil_div(shape["span"], config.keys) + 1))
    rows = tune.power_of_2(queries * group)
    partial = torch.empty((2 * programs, rows, block(width)), dtype=torch.float32, device=q.device)
    stats = torch.empty((2 * programs, 2, rows), dtype=torch.float32, device=q.device)
    pdl = pdl_options(facts)
    constants: dict[str, Any] = {
        "WINDOWED": settings.window > 0, "HAS_SINKS": sinks is not None, "BATCH": tune.power_of_2(batch), "ROWS": rows,
        "KEYS": config.keys, **pdl,
    }  # fmt: skip
    height = min(cache.page or config.keys, config.keys)
    launch(
        decode_stream, (programs,),
        q, _boxes(cache.k, height), _boxes(cache.v, height), cache.lengths, cache.table, sinks, o, lse, partial, stats,
        *q.stride()[:3], 0 if cache.table is None else cache.table.stride(0), batch, queries, heads, group, kv_heads,
        cache.capacity, settings.window, settings.sink_tokens, settings.scale, settings.softcap,
        CAP=settings.softcap > 0, PAGE=cache.page, WIDTH=width, BLOCK=block(width), STAGES=config.stages,
        REGISTERS=LOADER_REGISTERS, **constants, num_warps=4, maxnreg=_registers(config, width),
    )  # fmt: skip
    facts_of = {"units": batch * kv_heads, "rows": queries * group, "programs": programs, "value_dim": width}
    merge = tune.pick(COMBINE, facts, facts_of)
    launch(
        decode_combine, (batch * kv_heads, tune.ceil_div(queries * group, merge.rows)),
        partial, stats, cache.lengths, sinks, None, None, o, lse, 0, batch, queries, heads, group, kv_heads, 1,
        cache.capacity, settings.window, settings.sink_tokens, programs,
        SHARED=False, START=0, HAS_BEFORE=False, VALUES=width, BLOCK_V=block(width), HEADS=1, PIECES=merge.pieces,
        BLOCK=merge.rows, **constants, num_warps=merge.warps,
    )  # fmt: skip
    return o, lse


def _registers(config: Ring, width: int) -> int:
    """Registers a thread at the launch: multiplying warps take what loading ones leave; a half of all is theirs."""
    return 128 if config.per_sm > 1 else 144 if width <= 128 else 168


def _boxes(x: Tensor, height: int) -> Any:
    """Keys or values in boxes of `height` positions of one head, 64 columns wide; what lies outside reads as zero."""
    if x.data_ptr() % 16:  # dispatch declines this where it can see the address
        x = x.clone(memory_format=torch.contiguous_format)
    # A stride along one element is never taken, but must be a legal one.
    strides = [stride if size > 1 else x.shape[3] for size, stride in zip(x.shape, x.stride())]
    strides[3] = 1
    return described(_fields(height, x.dtype), x, x.shape, strides)


@lru_cache(maxsize=64)
def _fields(height: int, dtype: torch.dtype) -> dict[str, Any]:
    """What descriptors of such boxes have in common."""
    box = [1, height, 1, 64]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    return fields_of(torch.empty(box, dtype=dtype, device="meta"), box, layout)
