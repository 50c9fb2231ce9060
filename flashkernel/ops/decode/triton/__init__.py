"""Launchers of the Triton decoding kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashkernel.core import device, tune
from flashkernel.core.launch import launch, pdl_options
from flashkernel.ops.decode.configs import COMBINE, TILES, WALK, Tiles, Walk
from flashkernel.ops.decode.triton.kernels import decode_combine, decode_pieces
from flashkernel.ops.decode.triton.prefill import prefill


@dataclass(frozen=True)
class Cache:
    """Cached keys and values: (batch, capacity, kv_heads, dim), or with a table (pages, page_size, kv_heads, dim)."""

    k: Tensor
    v: Tensor
    lengths: Tensor
    table: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None

    @property
    def page(self) -> int:
        return 0 if self.table is None else self.k.shape[1]

    @property
    def capacity(self) -> int:
        return self.k.shape[1] if self.table is None else self.table.shape[1] * self.k.shape[1]

    @property
    def halves(self) -> Tensor | None:
        """The table as the kernels read it, in 16-bit halves."""
        return None if self.table is None else self.table.view(torch.int16)

    def strides(self) -> tuple[int, ...]:
        scale = (0, 0) if self.k_scale is None else self.k_scale.stride()[:2]
        table = 0 if self.table is None else 2 * self.table.stride(0)
        return (*self.k.stride()[:3], *self.v.stride()[:3], *scale, table)


@dataclass(frozen=True)
class Settings:
    """What is done to the scores; `prefix` is the number of keys all sequences share, or where the device keeps it."""

    window: int
    sink_tokens: int
    scale: float
    softcap: float
    prefix: int | Tensor = 0

    @property
    def start(self) -> int:
        return 2 if isinstance(self.prefix, Tensor) else 1 if self.prefix > 0 else 0


@dataclass(frozen=True)
class Parts:
    """Rows of one pass over the cache: of each sequence its own, or (`shared`) of all sequences together."""

    shared: bool
    sinks: Tensor | None
    before: tuple[Tensor, Tensor] | None  # (output, lse) of the part that an earlier pass has read


def forward(q: Tensor, cache: Cache, sinks: Tensor | None, settings: Settings) -> tuple[Tensor, Tensor]:
    """(o, lse): o is (batch, new, heads, value_dim) in q's dtype, lse (batch, heads, new) in float32."""
    before = None
    if settings.start:
        before = _pass(q, cache, settings, Parts(True, None, None), torch.float32)
    return _pass(q, cache, settings, Parts(False, sinks, before), q.dtype)


def forward_packed(
    q: Tensor, cu_seqlens: Tensor, cache: Cache, sinks: Tensor | None, settings: Settings
) -> tuple[Tensor, Tensor]:
    """(o, lse) of packed queries (tokens, heads, head_dim): o (tokens, heads, value_dim), lse (heads, tokens)."""
    tokens, heads, _ = q.shape
    kv_heads, values, batch = cache.k.shape[2], cache.v.shape[3], cache.lengths.shape[0]
    group = heads // kv_heads
    o = torch.empty((tokens, heads, values), dtype=q.dtype, device=q.device)
    lse = torch.empty((heads, tokens), dtype=torch.float32, device=q.device)
    shape = {
        "tokens": tokens, "group": group, "span": cache.capacity, "page": cache.page, "head_dim": q.shape[2],
        "value_dim": values, "bytes": cache.k.element_size(), "compute": q.element_size(),
    }  # fmt: skip
    config: Tiles = tune.pick(TILES, device.facts(q.device), shape)
    # Every sequence may leave a tile unfilled, and so may the tokens behind the last one.
    most = tune.ceil_div(tokens, config.rows // group) + min(batch + 1, tokens)
    launch(
        prefill, (most, kv_heads),
        q, cache.k, cache.v, cache.k_scale, cache.v_scale, cu_seqlens, cache.lengths, cache.halves, sinks, o, lse,
        *q.stride()[:2], *cache.strides(), batch, tokens, heads, cache.capacity,
        settings.window, settings.sink_tokens, settings.scale, settings.softcap,
        WINDOWED=settings.window > 0, CAP=settings.softcap > 0, SCALED=cache.k_scale is not None,
        HAS_SINKS=sinks is not None, PAGE=cache.page, **precision(q), **widths(q), VALUES=values,
        BLOCK_V=max(16, tune.power_of_2(values)), BATCH=tune.power_of_2(batch + 1), ROWS=config.rows, GROUP=group,
        KEYS=config.keys, STAGES=config.stages, num_warps=config.warps,
    )  # fmt: skip
    return o, lse


def _pass(q: Tensor, cache: Cache, settings: Settings, parts: Parts, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    batch, queries, heads, _ = q.shape
    kv_heads, values = cache.k.shape[2], cache.v.shape[3]
    group, facts = heads // kv_heads, device.facts(q.device)
    o = torch.empty((batch, queries, heads, values), dtype=dtype, device=q.device)
    lse = torch.empty((batch, heads, queries), dtype=torch.float32, device=q.device)
    sequences, tokens = (min(batch, 1), batch * queries) if parts.shared else (batch, queries)
    span = min(cache.capacity, settings.window + queries - 1 + settings.sink_tokens)
    shape = _shape(q, cache, span if settings.window else cache.capacity, sequences, tokens)
    config: Walk = tune.pick(WALK, facts, shape)
    row_tiles = tune.ceil_div(config.heads * tokens * group, config.rows)
    units = kv_heads // config.heads * row_tiles
    most = sequences * units * max(1, tune.ceil_div(shape["span"], config.keys) + 1)
    programs = min(config.per_sm * facts.sms, most) if config.split else sequences * units
    slots = 2 * programs if config.split else 0
    block_v = max(16, tune.power_of_2(values))
    partial = torch.empty((slots, config.rows, block_v), dtype=torch.float32, device=q.device)
    stats = torch.empty((slots, 2, config.rows), dtype=torch.float32, device=q.device)
    before, before_lse = parts.before if parts.before is not None else (None, None)
    sizes = (batch, queries, heads, group, kv_heads // config.heads, row_tiles, cache.capacity)
    constants: dict[str, Any] = {
        "SHARED": parts.shared, "START": settings.start, "WINDOWED": settings.window > 0,
        "HAS_SINKS": parts.sinks is not None, "HAS_BEFORE": before is not None, "VALUES": values, "BLOCK_V": block_v,
        "BATCH": tune.power_of_2(sequences), "ROWS": config.rows, "KEYS": config.keys, "HEADS": config.heads,
        **pdl_options(facts),
    }  # fmt: skip
    launch(
        decode_pieces, (programs,),
        q, cache.k, cache.v, cache.k_scale, cache.v_scale, cache.lengths, cache.halves, parts.sinks, before, before_lse,
        o, lse, partial, stats, settings.prefix, *q.stride()[:3], *cache.strides(), *sizes,
        settings.window, settings.sink_tokens, settings.scale, settings.softcap,
        WHOLE=not config.split, CAP=settings.softcap > 0, SCALED=cache.k_scale is not None, PAGE=cache.page,
        **precision(q), **widths(q), **constants, OVERLAP=config.overlap and config.split, STAGES=config.stages,
        num_warps=config.warps, **_registers(config, facts),
    )  # fmt: skip
    if config.split:
        rows = min(config.rows, config.heads * tokens * group)
        facts_of = {"units": sequences * units, "rows": rows, "programs": programs, "value_dim": values}
        merge = tune.pick(COMBINE, facts, facts_of)
        launch(
            decode_combine, (sequences * units, tune.ceil_div(rows, merge.rows)),
            partial, stats, cache.lengths, parts.sinks, before, before_lse, o, lse, settings.prefix,
            *sizes, settings.window, settings.sink_tokens, programs,
            **constants, PIECES=merge.pieces, BLOCK=merge.rows, num_warps=merge.warps,
        )  # fmt: skip
    return o, lse


def _registers(config: Walk, facts: device.Device) -> dict[str, int]:
    """A bound on a thread's registers where all programs must be resident at once, and the compiler might take more."""
    if not config.split or facts.kind != "cuda":
        return {}
    each = facts.registers_per_sm // (config.per_sm * config.warps * 32) // 8 * 8
    return {"maxnreg": each} if each < 255 else {}


def _shape(q: Tensor, cache: Cache, span: int, sequences: int, tokens: int) -> dict[str, int]:
    """What the launch config depends on."""
    return {
        "batch": sequences, "queries": tokens, "group": q.shape[2] // cache.k.shape[2], "kv_heads": cache.k.shape[2],
        "span": span, "page": cache.page, "head_dim": q.shape[-1], "value_dim": cache.v.shape[3],
        "bytes": cache.k.element_size(), "compute": q.element_size(),
    }  # fmt: skip


def widths(q: Tensor) -> dict[str, int]:
    """Width of a query, and what it is padded to."""
    return {"WIDTH": q.shape[-1], "BLOCK_D": max(16, tune.power_of_2(q.shape[-1]))}


def precision(q: Tensor) -> dict[str, str]:
    precise = q.dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32
    return {"PRECISION": "ieee" if precise else "tf32"}
