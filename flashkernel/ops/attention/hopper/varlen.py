"""Launches the Hopper attention kernels over packed sequences, by the schedule of varlen_schedule.py."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from flashkernel.blocks.ragged_gluon import ragged_descriptor
from flashkernel.core import device, tune
from flashkernel.core.tune import head_block as block
from flashkernel.ops.attention.hopper import backward_launch
from flashkernel.ops.attention.hopper.backward_configs import BackwardConfig, WideBackwardConfig
from flashkernel.ops.attention.hopper.backward_dq_configs import BACKWARD_DQ
from flashkernel.ops.attention.hopper.descriptors import tma_compatible
from flashkernel.ops.attention.hopper.forward_configs import FORWARD, Forward
from flashkernel.ops.attention.hopper.forward_launch import launch_forward
from flashkernel.ops.attention.hopper.launch_options import allocate_outputs, without_keys
from flashkernel.ops.attention.hopper.shape_buckets import MEDIUM_CONTEXT
from flashkernel.ops.attention.hopper.varlen_layout import TileShape, VarlenLayout, VarlenShape, kernel_arguments
from flashkernel.ops.attention.hopper.varlen_schedule import make_schedule
from flashkernel.ops.attention.varlen.params import NO_LIMIT, HeadShape, VarlenInputs, VarlenParams, schedule_size

_BLOCK = 128  # queries and keys of the blocks in which visible keys are estimated


def schedule(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, tokens: tuple[int, int], heads: HeadShape, dtype: torch.dtype,
    params: VarlenParams, gradients: bool,
) -> Tensor:  # fmt: skip
    """Returns the tile schedule of all calls with these lengths and shapes, int32; of both directions with `gradients`.
    It takes one launch, and nothing waits for the device."""
    configs = _launch_configs(tokens, heads, dtype, params, cu_seqlens_q.device)
    size = schedule_size(params.num_sequences, *tokens, heads.heads)
    return make_schedule(cu_seqlens_q, cu_seqlens_k, configs.layout, size, gradients, params.left, params.right)


def forward(inputs: VarlenInputs, schedule: Tensor, params: VarlenParams) -> tuple[Tensor, Tensor]:
    """Returns (o, lse): o (tokens_q, heads, value_dim) in q's dtype, lse (heads, tokens_q) in float32."""
    q, k, v, sinks = inputs
    o, lse = allocate_outputs(q[None], v.shape[2], q.dtype)
    if k.shape[0] == 0:
        without_keys(o, lse, sinks)
    elif q.shape[0] > 0:
        configs = _configs_of(inputs, params)
        scheduled = _ForwardSchedule(configs.layout, schedule)
        # A query that sees no key has its work tile computed twice, but has none unless keys are fewer than queries.
        fixed_max = q.dtype == torch.bfloat16
        launch_forward(
            inputs.one_batch, o, lse, params.attention, configs.forward, scheduled, fixed_max, _descriptor
        )  # fmt: skip
    return o[0], lse[0]


def backward(
    do: Tensor, dlse: Tensor | None, inputs: VarlenInputs, o: Tensor, lse: Tensor, schedule: Tensor,
    params: VarlenParams,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Returns the gradients (dq, dk, dv, dsinks).

    Args:
        do: (tokens_q, heads, value_dim), gradient of o.
        dlse: (heads, tokens_q) float32, gradient of lse; or None.
        inputs: q, k, v and the learned sinks.
        o: (tokens_q, heads, value_dim), output of the forward pass.
        lse: (heads, tokens_q) float32, its log-sum-exp.
        schedule: that of the forward pass, made with `gradients`.
    """
    batch_dlse = None if dlse is None else dlse[None]
    whole = inputs.one_batch
    if inputs.q.shape[0] == 0 or inputs.k.shape[0] == 0:
        dq, dk, dv, _, dsinks, _ = backward_launch.without_keys(batch_dlse, whole.q, whole.k, whole.v, whole.sinks)
        return dq[0], dk[0], dv[0], dsinks
    configs = _configs_of(inputs, params)
    layout = configs.layout
    by_queries = configs.backward.dq_mode == "dq_kernel"
    launches = backward_launch.BackwardLaunch(
        configs.backward, layout.backward_grid.num_programs,
        kernel_arguments(layout.backward_table(schedule), layout.backward_grid), layout.query_blocks, _descriptor,
        layout.query_blocks_table(schedule),
        (configs.forward, _ForwardSchedule(layout, schedule)) if by_queries else None,
    )  # fmt: skip
    dq, dk, dv, _, dsinks, _ = backward_launch.launch_backward(
        do[None], batch_dlse, whole, o[None], lse[None], params.attention, launches
    )
    return dq[0], dk[0], dv[0], dsinks


@dataclass(frozen=True)
class _ForwardSchedule:
    """The tables of a forward launch, as `ForwardSchedule`."""

    layout: VarlenLayout
    schedule: Tensor
    varlen: ClassVar[bool] = True

    @property
    def num_programs(self) -> int:
        return self.layout.forward_grid.num_programs

    @property
    def arguments(self) -> tuple[Any, ...]:
        return kernel_arguments(self.layout.forward_table(self.schedule), self.layout.forward_grid)

    def retry_flags(self) -> Tensor:
        """Uninitialized flags of work tiles that overflow (overflow_retry.py)."""
        grid = self.layout.forward_grid
        return torch.empty((grid.num_programs, grid.max_work_tiles), dtype=torch.int32, device=self.schedule.device)


@dataclass(frozen=True)
class _LaunchConfigs:
    """Launch configs of both directions, and where their tables lie in the schedule."""

    forward: Forward
    backward: BackwardConfig | WideBackwardConfig
    layout: VarlenLayout


def _configs_of(inputs: VarlenInputs, params: VarlenParams) -> _LaunchConfigs:
    q, k, v, _ = inputs
    heads = HeadShape(q.shape[1], k.shape[1], q.shape[2], v.shape[2])
    return _launch_configs((q.shape[0], k.shape[0]), heads, q.dtype, params, q.device)


def _launch_configs(
    tokens: tuple[int, int], heads: HeadShape, dtype: torch.dtype, params: VarlenParams, where: torch.device
) -> _LaunchConfigs:
    shape = _config_shape(tokens, heads, dtype, params)
    forward: Forward = tune.pick(FORWARD, device.properties(where), shape)
    wide_tiles = forward.num_consumers == 3 and block(shape["head_dim"]) == 128 and shape["seqlen_q"] > MEDIUM_CONTEXT
    if wide_tiles and forward.pack_gqa == 4 and not tune.overridden():
        forward = replace(forward, pack_gqa=2)  # 5% faster than 4 for sequences of 37 to 4000 tokens
    if forward.q_in_registers and not tune.overridden():
        forward = replace(forward, q_in_registers=False)  # records of packed work tiles take registers, too
    backward = backward_launch.backward_config(shape, params.attention, where)
    long_tiles = shape["group_size"] * shape["mean_visible_keys"] > MEDIUM_CONTEXT
    if isinstance(backward, BackwardConfig) and shape["head_dim"] > 64 and long_tiles:
        # A second stage of K and V hides the prologue of work tiles; many blocks gain more from shorter steps.
        backward = replace(backward, kv_stages=1)
    if backward.dq_mode == "dq_kernel":  # it goes by the forward pass's part of the schedule
        forward = tune.pick(BACKWARD_DQ, device.properties(where), shape)
    return _LaunchConfigs(
        forward, backward,
        VarlenLayout(
            VarlenShape(params.num_sequences, *tokens),
            TileShape(forward.block_m, forward.block_n, forward.num_consumers, forward.pad_front),
            TileShape(backward.block_n, backward.block_m, TRANSPOSED=True),
            heads.heads, heads.kv_heads, forward.pack_gqa, device.properties(where).sms,
        ),
    )  # fmt: skip


def _config_shape(
    tokens: tuple[int, int], heads: HeadShape, dtype: torch.dtype, params: VarlenParams
) -> dict[str, int]:
    """What the launch configs depend on (`config_shape`), for sequences of the mean length: the lengths themselves are
    on the device."""
    mean_q, mean_k = (tune.ceil_div(count, params.num_sequences) for count in tokens)
    seqlen_q, seqlen_k = tune.power_of_2(mean_q), tune.power_of_2(mean_k)
    visible = mean_k
    if params.right < NO_LIMIT:
        visible = (mean_k + _BLOCK) // 2
    if params.left < NO_LIMIT:
        reach = params.left + min(params.right, seqlen_k) + _BLOCK
        visible = min(visible, tune.ceil_div(reach, _BLOCK) * _BLOCK)
    return {
        "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "mean_visible_keys": min(visible, mean_k),
        "head_dim": heads.head_dim, "value_dim": heads.value_dim, "group_size": heads.heads // heads.kv_heads,
        "fixed_max": int(dtype == torch.bfloat16), "masked": int(params.mask is not None),
        "has_tables": 0,
    }  # fmt: skip


def _descriptor(x: Tensor, box: tuple[int, int]) -> Any:
    """Returns the ragged TMA descriptor of x (1, tokens, heads, head_dim) for tiles of `box` = (tokens, heads)."""
    return ragged_descriptor(tma_compatible(x)[0], (*box, block(x.shape[3])))
