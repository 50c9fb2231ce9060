"""Launches the Hopper attention forward kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from flashkernel.blocks.constants import LOG2E
from flashkernel.blocks.mask import Mask
from flashkernel.core import device, tune
from flashkernel.core.launch import launch
from flashkernel.ops.attention.hopper.block_ranges import BlockRanges, block_ranges
from flashkernel.ops.attention.hopper.descriptors import tile_descriptor
from flashkernel.ops.attention.hopper.forward_configs import FORWARD, PRODUCER_REGISTERS, Forward, block, reuse_q_for_o
from flashkernel.ops.attention.hopper.forward_kernel import ForwardTraits, attention_forward
from flashkernel.ops.attention.hopper.launch_options import (
    UNMASKED_KV_HEADS,
    allocate_outputs,
    can_fix_max,
    config_shape,
    head_group,
    without_keys,
)
from flashkernel.ops.attention.hopper.pipeline import TileTables
from flashkernel.ops.attention.hopper.shape_buckets import head_tail
from flashkernel.ops.attention.hopper.softmax import Scales
from flashkernel.ops.attention.hopper.tile_scheduler import TileGrid, tile_schedule
from flashkernel.ops.attention.params import AttentionInputs, AttentionParams


@dataclass(frozen=True)
class ForwardSchedule:
    """The tables of a forward launch: block ranges of every work tile, and which program takes which work tiles."""

    ranges: BlockRanges
    work_tiles: Tensor  # `tile_schedule`
    varlen: ClassVar[bool] = False

    @property
    def num_programs(self) -> int:
        """Persistent programs: one per SM, or one per work tile if there are fewer of them."""
        return self.work_tiles.shape[0]

    @property
    def arguments(self) -> tuple[TileTables | int, ...]:
        """Kernel arguments: tables, max_ranges, max_loads, batch_stride, head_stride, max_work_tiles. Triton compiles
        integers inside a NamedTuple for multiples of 16 of their own, so they are arguments of their own."""
        ranges = self.ranges
        tables = TileTables(ranges.ranges, ranges.counts, ranges.loads, ranges.load_counts, self.work_tiles)
        sizes = (ranges.ranges.shape[-2], ranges.loads.shape[-2], *ranges.strides, self.work_tiles.shape[1])
        return tables, *sizes

    def retry_flags(self) -> Tensor:
        """Uninitialized flags of work tiles that overflow (overflow_retry.py)."""
        return torch.empty(self.work_tiles.shape[:2], dtype=torch.int32, device=self.work_tiles.device)


def schedule_forward(
    mask: Mask | None, q: Tensor, k: Tensor, config: Any, kv_bytes: int, unmasked_kv_heads: int, pad_front: bool = False
) -> ForwardSchedule:
    """Returns the schedule of a forward launch, 16-bit or FP8.

    Args:
        config: launch config with `num_consumers`, `block_m`, `block_n` and `pack_gqa`.
        kv_bytes: bytes of K and V of one kv head.
        unmasked_kv_heads: kv heads that are worked on at the same time if there is no mask.
        pad_front: which consumers have no block of queries if those do not divide evenly (`block_ranges`).
    """
    batch, seqlen_q, heads, _ = q.shape
    seqlen_k, kv_heads = k.shape[1:3]
    tile_shape = (seqlen_q, seqlen_k, config.block_m, config.block_n, config.num_consumers)
    ranges = block_ranges(mask, batch, heads, *tile_shape, q.device, pad_front=pad_front)
    properties = device.properties(q.device)
    pack_gqa = config.pack_gqa
    tiles_per_head = tune.ceil_div(seqlen_q, config.num_consumers * config.block_m)
    batch_heads = batch * heads // pack_gqa
    heads_at_a_time = head_group(
        properties, kv_bytes, heads // kv_heads // pack_gqa, batch_heads, mask is not None, unmasked_kv_heads
    )  # fmt: skip
    grid = TileGrid(batch_heads, tiles_per_head, heads // pack_gqa, pack_gqa, heads_at_a_time)
    num_programs = min(properties.sms, tiles_per_head * batch_heads)
    return ForwardSchedule(ranges, tile_schedule(mask, ranges, grid, num_programs, tile_shape))


def forward(inputs: AttentionInputs, params: AttentionParams) -> tuple[Tensor, Tensor]:
    """Returns (o, lse): o (batch, seqlen_q, heads, value_dim) in q's dtype, lse (batch, heads, seqlen_q) in float32."""
    q, k, v, _, sinks, _ = inputs
    batch, seqlen_q, _, head_dim = q.shape
    seqlen_k, value_dim = k.shape[1], v.shape[3]
    o, lse = allocate_outputs(q, value_dim, q.dtype)
    if batch == 0 or seqlen_q == 0:
        return o, lse
    if seqlen_k == 0:
        return without_keys(o, lse, sinks)
    config = _forward_config(q, k, v, params)
    scheduled = schedule_forward(
        params.mask, q, k, config, seqlen_k * (head_dim + value_dim) * k.element_size(), UNMASKED_KV_HEADS,
        pad_front=config.pad_front,
    )  # fmt: skip
    launch_forward(inputs, o, lse, params, config, scheduled, can_fix_max(q, k, params), tile_descriptor)
    return o, lse


def launch_forward(
    inputs: AttentionInputs, o: Tensor, lse: Tensor, params: AttentionParams, config: Forward, scheduled: Any,
    fixed_max: bool, descriptor: Callable[[Tensor, tuple[int, int]], Any],
) -> None:  # fmt: skip
    """Launches the forward kernel.

    Args:
        scheduled: `ForwardSchedule`, or that of packed sequences, which are one batch entry.
        fixed_max: optimistic softmax.
        descriptor: makes the TMA descriptor of a tensor for tiles of (positions, heads).
    """
    q, k, v, _, sinks, _ = inputs
    seqlen_q, heads, head_dim = q.shape[1:]
    # With a softcap or a scale <= 0 the largest product is not the largest score: S is scaled before the row max.
    scale_first = params.softcap > 0 or params.scale <= 0
    traits = forward_traits(config, params, head_dim, v.shape[3], fixed_max, scale_first, sinks is not None)
    traits = traits._replace(VARLEN=scheduled.varlen)
    mask, _, _, _, mask_tables = params.functions()
    q_box, kv_box = (config.block_m, config.pack_gqa), (config.block_n, 1)
    launch(
        attention_forward, (scheduled.num_programs,),
        lse, descriptor(q, q_box), descriptor(k, kv_box), descriptor(v, kv_box), descriptor(o, q_box), sinks,
        scheduled.retry_flags() if fixed_max else None, mask_tables, *scheduled.arguments, heads, heads // k.shape[2],
        seqlen_q, k.shape[1], Scales(1.0 if scale_first else params.scale * LOG2E, params.scale, params.softcap),
        MASK=mask, TRAITS=traits, num_warps=4,
    )  # fmt: skip


def forward_traits(
    config: Forward, params: AttentionParams, head_dim: int, value_dim: int, fixed_max: bool, scale_first: bool,
    has_sinks: bool,
) -> ForwardTraits:  # fmt: skip
    """Returns what the kernel is compiled for."""
    mask = params.mask
    return ForwardTraits(
        NUM_CONSUMERS=config.num_consumers,
        NUM_STAGES=config.num_stages,
        Q_STAGES=2 if config.overlap else 1,
        BLOCK_N=config.block_n,
        HEAD_DIM=block(head_dim),
        VALUE_DIM=block(value_dim),
        PACK_GQA=config.pack_gqa,
        PAD_FRONT=config.pad_front,
        OVERLAP=config.overlap,
        FIXED_MAX=fixed_max,
        OVERFLOW_RETRY=fixed_max,
        REUSE_Q_FOR_O=reuse_q_for_o(head_dim, value_dim),
        SOFTCAP=params.softcap > 0,
        SCALE_FIRST=scale_first,
        MASK_RELATIVE=mask is not None and mask.relative and config.num_consumers == 2,  # it takes registers
        MASK_BOUNDED=mask is not None and mask.bounded,
        HAS_SINKS=has_sinks,
        CONSUMER_REGISTERS=config.consumer_registers,
        PRODUCER_REGISTERS=PRODUCER_REGISTERS,
        HEAD_TAIL=head_tail(head_dim, config.split_heads),
        VALUE_TAIL=head_tail(value_dim, config.split_heads),
        Q_IN_REGISTERS=config.q_in_registers,
    )


def _forward_config(q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Forward:
    return unpacked_by_head(tune.pick(FORWARD, device.properties(q.device), config_shape(q, k, v, params)), params)


def unpacked_by_head(config: Forward, params: AttentionParams) -> Forward:
    """Returns the config of a call; heads are not packed if the mask differs between them."""
    if params.mask is not None and "h" in params.mask.depends:
        return replace(config, pack_gqa=1)
    return config
