"""Launches the Hopper attention backward kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks.constants import LOG2E
from flashkernel.core import device, tune
from flashkernel.core.launch import launch, pdl_options
from flashkernel.ops.attention.hopper import window_backward
from flashkernel.ops.attention.hopper.backward_common import BackwardTraits
from flashkernel.ops.attention.hopper.backward_configs import (
    BACKWARD,
    WIDE_BACKWARD,
    WINDOW,
    BackwardConfig,
    WideBackwardConfig,
    block,
)
from flashkernel.ops.attention.hopper.backward_dq_configs import BACKWARD_DQ
from flashkernel.ops.attention.hopper.backward_dq_kernel import attention_backward_dq
from flashkernel.ops.attention.hopper.backward_kernel import attention_backward
from flashkernel.ops.attention.hopper.block_ranges import block_ranges
from flashkernel.ops.attention.hopper.descriptors import reduce_descriptor, tile_descriptor, vector_descriptor
from flashkernel.ops.attention.hopper.forward_configs import Forward
from flashkernel.ops.attention.hopper.forward_launch import forward_traits, schedule_forward, unpacked_by_head
from flashkernel.ops.attention.hopper.launch_options import UNMASKED_KV_HEADS, config_shape, head_group
from flashkernel.ops.attention.hopper.pipeline import TileTables
from flashkernel.ops.attention.hopper.preprocess import attention_backward_postprocess, attention_backward_preprocess
from flashkernel.ops.attention.hopper.shape_buckets import head_tail
from flashkernel.ops.attention.hopper.softmax import Scales
from flashkernel.ops.attention.hopper.tile_scheduler import TileGrid, tile_schedule
from flashkernel.ops.attention.params import AttentionInputs, AttentionParams, InputGradients, OutputGradients


@dataclass(frozen=True)
class BackwardLaunch:
    """How the backward kernels are launched.

    Attributes:
        config: launch config of the main kernel.
        programs: persistent programs of the main kernel.
        tables: kernel arguments: `TileTables`, max_ranges, max_loads, batch_stride, head_stride, max_work_tiles.
        q_blocks: blocks of queries of a head, in lse_delta and dq_accum.
        descriptor: makes the TMA descriptor of a tensor for tiles of (positions, heads).
        query_blocks: of packed sequences, the rows of every block (preprocess.py); they are one batch entry.
        dq: with dq_mode "dq_kernel", (launch config, schedule as of the forward pass) of the kernel of dQ.
    """

    config: BackwardConfig | WideBackwardConfig
    programs: int
    tables: tuple[Any, ...]
    q_blocks: int
    descriptor: Callable[[Tensor, tuple[int, int]], Any] = tile_descriptor
    query_blocks: Tensor | None = None
    dq: tuple[Forward, Any] | None = None


def backward(
    outputs: OutputGradients, inputs: AttentionInputs, params: AttentionParams, want_bias: bool
) -> InputGradients:
    """Returns the gradients (dq, dk, dv, None, dsinks, None).

    Args:
        outputs: o and lse of the forward pass, and their gradients.
        inputs: q, k, v and the learned sinks; this backend serves no bias and no ALiBi slopes.
    """
    (q, k, v, _, sinks, _), (o, lse, do, dlse) = inputs, outputs
    if k.shape[1] == 0 or q.numel() == 0:
        return without_keys(dlse, q, k, v, sinks)
    shape = config_shape(q, k, v, params)
    config = backward_config(shape, params, q.device)
    if config.dq_mode == WINDOW:
        return _window(do, dlse, inputs, o, lse, params, shape["window"])
    return launch_backward(do, dlse, inputs, o, lse, params, _backward_launch(q, k, v, params, shape, config))


def _window(
    do: Tensor, dlse: Tensor | None, inputs: AttentionInputs, o: Tensor, lse: Tensor, params: AttentionParams,
    window: int,
) -> InputGradients:  # fmt: skip
    """Launches preprocess (delta), and the kernel that computes dq, dk and dv under a narrow window."""
    q, k, v, _, sinks, _ = inputs
    padded = tune.ceil_div(q.shape[1], window_backward.BLOCK) * window_backward.BLOCK
    lse_delta = torch.empty((2, q.shape[0], q.shape[2], padded), dtype=torch.float32, device=q.device)
    dsinks = _preprocess(do, dlse, sinks, o, lse, lse_delta, None, None, LOG2E)
    dq, dk, dv = window_backward.launch(do, q, k, v, lse_delta, window, params.scale)
    return dq, dk, dv, None, None if sinks is None or dsinks is None else dsinks.sum((0, 2)).to(sinks.dtype), None


def launch_backward(
    do: Tensor, dlse: Tensor | None, inputs: AttentionInputs, o: Tensor, lse: Tensor, params: AttentionParams,
    options: BackwardLaunch,
) -> tuple[Tensor, Tensor, Tensor, None, Tensor | None, None]:  # fmt: skip
    """Launches three kernels: preprocess (delta, and zeros in dq_accum), the main kernel (dk, dv, dq_accum) and
    postprocess (dq from dq_accum), or instead of it the kernel of dQ. Returns what `backward` does."""
    q, k, v, _, sinks, _ = inputs
    config, q_blocks = options.config, options.q_blocks
    batch, seqlen_q, heads, head_dim = q.shape
    padded = q_blocks * config.block_m
    lse_delta = torch.empty((2, batch, heads, padded), dtype=torch.float32, device=q.device)
    lse_scale = 1 / params.scale if config.fold_lse else LOG2E  # S is scaled after -LSE has been folded in
    if options.dq is not None:
        delta = torch.empty_like(lse)
        dsinks_partial = _preprocess(do, dlse, sinks, o, lse, lse_delta, delta, None, lse_scale, options)
        dk, dv = _main(do, q, k, v, lse_delta, None, params, options)
        dq = _dq(do, q, k, v, lse, delta, params, options.descriptor, *options.dq)
        summed = None if dsinks_partial is None else dsinks_partial.sum((0, 2))
        return dq, dk, dv, None, None if sinks is None or summed is None else summed.to(sinks.dtype), None
    dq_accum = torch.empty((batch, heads, padded, block(head_dim)), dtype=torch.float32, device=q.device)
    dsinks_partial = _preprocess(do, dlse, sinks, o, lse, lse_delta, None, dq_accum, lse_scale, options)
    dsinks = None if sinks is None else torch.empty(sinks.shape, dtype=sinks.dtype, device=sinks.device)
    dk, dv = _main(do, q, k, v, lse_delta, dq_accum, params, options)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    launch(
        attention_backward_postprocess, (heads * q_blocks * batch,),
        dq_accum, dq, dsinks_partial, dsinks, options.query_blocks, params.scale, heads, seqlen_q, q_blocks,
        0 if dsinks_partial is None else dsinks_partial.shape[2],
        HAS_SINKS=sinks is not None, HEAD_DIM=head_dim, BLOCK_D=block(head_dim), BLOCK_M=config.block_m,
        DQ_MODE=config.dq_mode, num_warps=8, **pdl_options(device.properties(q.device)),
    )  # fmt: skip
    return dq, dk, dv, None, dsinks, None


def without_keys(
    dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, None, Tensor | None, None]:
    """Returns the gradients where no query sees a key: zeros. LSE is then the sink's logit."""
    dsinks = None
    if sinks is not None:
        dsinks = torch.zeros_like(sinks) if dlse is None else dlse.sum((0, 2)).to(sinks.dtype)
    dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    return dq, dk, dv, None, dsinks, None


def _preprocess(
    do: Tensor, dlse: Tensor | None, sinks: Tensor | None, o: Tensor, lse: Tensor, lse_delta: Tensor,
    delta: Tensor | None, dq_accum: Tensor | None, lse_scale: float, options: BackwardLaunch | None = None,
) -> Tensor | None:  # fmt: skip
    """Fills lse_delta, and delta where it is given; zeroes dq_accum. Returns the gradient of the sinks in parts,
    [batch, heads, blocks]."""
    query_blocks, table_block = None, 64
    if options is not None and options.query_blocks is not None:
        query_blocks, table_block = options.query_blocks, options.config.block_m
    batch, seqlen_q, heads, value_dim = o.shape
    padded, block_m = lse_delta.shape[3], 64
    blocks = padded // block_m
    dsinks = None if sinks is None else torch.empty((batch, heads, blocks), dtype=torch.float32, device=o.device)
    launch(
        attention_backward_preprocess, (heads * blocks * batch,),
        o, do, lse, dlse, sinks, lse_delta, delta, dq_accum, dsinks, query_blocks, *do.stride()[:3], heads,
        seqlen_q, padded, lse_scale, HAS_DLSE=dlse is not None, HAS_SINKS=sinks is not None, BLOCK_M=block_m,
        TABLE_BLOCK=table_block, VALUE_DIM=value_dim, BLOCK_DV=block(value_dim),
        BLOCK_D=1 if dq_accum is None else dq_accum.shape[3],
        PDL=pdl_options(device.properties(o.device))["PDL"], num_warps=4,
    )  # fmt: skip
    return dsinks


def _main(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse_delta: Tensor, dq_accum: Tensor | None,
    params: AttentionParams, options: BackwardLaunch,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Adds dQ / scale to dq_accum, if there is one, and returns (dk, dv)."""
    batch, seqlen_q, heads, head_dim = q.shape
    seqlen_k, kv_heads, value_dim = k.shape[1], k.shape[2], v.shape[3]
    config, descriptor = options.config, options.descriptor
    dk = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    mask, _, _, _, mask_tables = params.functions()
    traits = _traits(config, params, head_dim, value_dim, device.properties(q.device))
    if options.query_blocks is not None:
        traits = traits._replace(VARLEN=True, MASK_RELATIVE=False)
    q_box, kv_box = (config.block_m, 1), (config.block_n, 1)
    launch(
        attention_backward, (options.programs,),
        reduce_descriptor(dq_accum) if dq_accum is not None and config.dq_mode == "tma_reduce" else dq_accum,
        descriptor(q, q_box), descriptor(do, q_box), descriptor(k, kv_box), descriptor(v, kv_box),
        vector_descriptor(lse_delta, config.block_m), descriptor(dk, kv_box), descriptor(dv, kv_box),
        mask_tables, *options.tables, batch * kv_heads, kv_heads, heads // kv_heads, options.q_blocks, seqlen_q,
        seqlen_k, Scales(params.scale * LOG2E, params.scale, params.softcap),
        MASK=mask, TRAITS=traits, num_warps=4, launch_pdl=traits.PDL,
    )  # fmt: skip
    return dk, dv


def _dq(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, params: AttentionParams,
    descriptor: Callable[[Tensor, tuple[int, int]], Any], config: Forward, scheduled: Any,
) -> Tensor:  # fmt: skip
    """Returns dq by a kernel of its own (backward_dq_kernel.py)."""
    seqlen_q, heads, head_dim = q.shape[1:]
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    traits = forward_traits(config, params, head_dim, v.shape[3], False, False, False)
    traits = traits._replace(VARLEN=scheduled.varlen, REUSE_Q_FOR_O=False)
    mask, _, _, _, mask_tables = params.functions()
    q_box, kv_box = (config.block_m, config.pack_gqa), (config.block_n, 1)
    launch(
        attention_backward_dq, (scheduled.num_programs,),
        lse, delta, descriptor(q, q_box), descriptor(k, kv_box), descriptor(v, kv_box), descriptor(do, q_box),
        descriptor(dq, q_box), mask_tables, *scheduled.arguments, heads, heads // k.shape[2], seqlen_q, k.shape[1],
        Scales(params.scale * LOG2E, params.scale, params.softcap), MASK=mask, TRAITS=traits, num_warps=4,
    )  # fmt: skip
    return dq


def _backward_launch(
    q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, shape: dict[str, int],
    config: BackwardConfig | WideBackwardConfig,
) -> BackwardLaunch:  # fmt: skip
    batch, seqlen_q, heads, _ = q.shape
    seqlen_k = k.shape[1]
    ranges = block_ranges(
        params.mask, batch, heads, seqlen_q, seqlen_k, config.block_m, config.block_n, 1, q.device, transposed=True
    )
    grid, programs = _grid(q, k, v, params, config)
    schedule = tile_schedule(params.mask, ranges, grid, programs, (seqlen_q, seqlen_k, config.block_m, config.block_n))
    tables = TileTables(ranges.ranges, ranges.counts, ranges.loads, ranges.load_counts, schedule)
    sizes = (ranges.ranges.shape[-2], ranges.loads.shape[-2], *ranges.strides, schedule.shape[1])
    dq = None
    if config.dq_mode == "dq_kernel":
        dq_config = unpacked_by_head(tune.pick(BACKWARD_DQ, device.properties(q.device), shape), params)
        kv_bytes = seqlen_k * (k.shape[3] + v.shape[3]) * k.element_size()
        dq = dq_config, schedule_forward(params.mask, q, k, dq_config, kv_bytes, UNMASKED_KV_HEADS, dq_config.pad_front)
    return BackwardLaunch(config, programs, (tables, *sizes), tune.ceil_div(seqlen_q, config.block_m), dq=dq)


def _traits(
    config: BackwardConfig | WideBackwardConfig, params: AttentionParams, head_dim: int, value_dim: int,
    properties: device.Device,
) -> BackwardTraits:  # fmt: skip
    """Returns what the kernel is compiled for."""
    mask = params.mask
    # Relative positions take registers, which only narrow heads and blocks leave.
    spare_registers = config.block_n == 128 and config.block_m == block(head_dim) == 64
    return BackwardTraits(
        WIDE=isinstance(config, WideBackwardConfig),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        NUM_STAGES=config.num_stages,
        KV_STAGES=config.kv_stages,
        FOLD_LSE=config.fold_lse,
        FOLD_DELTA=config.fold_delta,
        DQ_MODE=config.dq_mode,
        HEAD_DIM=block(head_dim),
        VALUE_DIM=block(value_dim),
        SOFTCAP=params.softcap > 0,
        MASK_RELATIVE=mask is not None and mask.relative and spare_registers,
        MASK_BOUNDED=mask is not None and mask.bounded,
        PDL=pdl_options(properties)["PDL"],
        HEAD_TAIL=head_tail(head_dim, config.split_heads),
        VALUE_TAIL=head_tail(value_dim, config.split_heads),
    )


def _grid(
    q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, config: BackwardConfig | WideBackwardConfig
) -> tuple[TileGrid, int]:
    """Returns (work tiles, number of persistent programs)."""
    batch, seqlen_q, heads, head_dim = q.shape
    seqlen_k, kv_heads, value_dim = k.shape[1], k.shape[2], v.shape[3]
    properties, group_size = device.properties(q.device), heads // kv_heads
    tiles, batch_heads = tune.ceil_div(seqlen_k, config.block_n), batch * kv_heads
    # Of each query head Q, dO and dq_accum, which is added to all the time; of each kv head K, V, dK and dV.
    kv_bytes = group_size * seqlen_q * (q.element_size() * (head_dim + value_dim) + 4 * block(head_dim))
    kv_bytes += 2 * seqlen_k * (head_dim + value_dim) * k.element_size()
    # Under a mask at least as many heads as are worked on anyway, and two: fewer programs then ask for the same blocks.
    least = 1 if params.mask is None else max(2, properties.sms // tiles)
    heads_per_group = min(
        batch_heads, max(least, head_group(properties, kv_bytes, 1, batch_heads, params.mask is not None))
    )
    heads_per_group = _even_groups(batch_heads, heads_per_group)
    # If the mask has tables, the lengths of work tiles are unknown: each gets a program, and the device schedules them.
    lengths_known = params.mask is None or not params.mask.tables
    programs = min(properties.sms, tiles * batch_heads) if lengths_known else tiles * batch_heads
    return TileGrid(batch_heads, tiles, kv_heads, 1, heads_per_group, transposed=True, group_size=group_size), programs


def backward_config(
    shape: dict[str, int], params: AttentionParams, where: torch.device
) -> BackwardConfig | WideBackwardConfig:
    """Returns the launch config. Nothing is folded into scores that are capped or scaled by zero. If gradients must be
    deterministic, a kernel of its own computes dQ."""
    properties = device.properties(where)
    if max(shape["head_dim"], shape["value_dim"]) > 128:
        wide: WideBackwardConfig = tune.pick(WIDE_BACKWARD, properties, shape)
        return replace(wide, dq_mode="dq_kernel") if params.deterministic else wide
    config: BackwardConfig = tune.pick(BACKWARD, properties, shape)
    if params.deterministic and config.dq_mode != WINDOW:
        config = replace(config, dq_mode="dq_kernel")
    if params.softcap != 0 or params.scale == 0:
        return replace(config, fold_lse=False, fold_delta=False)
    return config


def _even_groups(batch_heads: int, head_group: int) -> int:
    """Returns a head group of this size or a little larger: with a small last group, its longest work tiles would start
    last."""
    return tune.ceil_div(batch_heads, max(1, batch_heads // head_group))
