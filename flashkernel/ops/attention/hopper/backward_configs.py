"""Launch configs of the Hopper attention backward kernels: block sizes, stages, and how dQ is accumulated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from flashkernel.core.device import Device
from flashkernel.core.tune import Tunable
from flashkernel.core.tune import head_block as block
from flashkernel.core.versions import triton_version
from flashkernel.ops.attention.hopper.shape_buckets import (
    BARRIER_BYTES,
    MEDIUM_CONTEXT,
    bucket,
    can_split,
    no_split,
)

_SHORT_CONTEXT = 1024  # visible keys, up to which a third warpgroup computes dQ
_DQ_MODES = ("atomic", "tma_reduce", "dq_warpgroup", "dq_kernel")
WINDOW = "window"  # the dq_mode of window_backward.cu


@dataclass(frozen=True)
class BackwardConfig:
    """Launch config of heads up to 128 wide.

    Attributes:
        block_m: queries of a block.
        num_stages: blocks of queries (Q, dO, LSE, delta) in flight.
        fold_lse: S accumulates onto -LSE, which saves registers.
        fold_delta: dP accumulates onto -delta, likewise.
        kv_stages: work tiles whose K and V are in shared memory. With two, the next work tile's are loaded meanwhile.
        dq_mode: how dQ is added to its float32 accumulator. "atomic": by both warpgroups, half of a block each, from
            registers. "tma_reduce": likewise, through shared memory by TMA. "dq_warpgroup": by a third warpgroup.
            "dq_kernel": not at all; a kernel of its own computes dQ in a fixed order (backward_dq_kernel.py). "window":
            not at all; under a narrow causal window one kernel computes all gradients (window_backward.cu).
        split_heads: of heads such as 80 or 96, only columns with data are multiplied (head_split.py).
        block_n: keys of a work tile.
    """

    block_m: int
    num_stages: int
    fold_lse: bool
    fold_delta: bool
    kv_stages: int = 2
    dq_mode: str = "atomic"
    split_heads: bool = False
    block_n: ClassVar[int] = 128


WINDOW_CONFIG = BackwardConfig(64, 4, fold_lse=False, fold_delta=False, kv_stages=4, dq_mode=WINDOW)


def _valid(config: BackwardConfig, device: Device, shape: Mapping[str, int]) -> str | None:
    if config.dq_mode == WINDOW:
        if not shape.get("window"):
            return "dq_mode window is for a causal window of at most 129 keys, heads of 64 and as many queries as keys"
        return None if config == WINDOW_CONFIG else f"window_backward.cu has one config, {WINDOW_CONFIG}"
    head_dim, value_dim = block(shape["head_dim"]), block(shape["value_dim"])
    widest = max(head_dim, value_dim)
    if widest > 128:
        return f"heads must be at most 128 wide, not {shape['head_dim']} and {shape['value_dim']}"
    if config.block_m == 128 and widest > 64:
        return "the registers hold blocks of 128 queries for heads at most 64 wide only"
    if config.dq_mode not in _DQ_MODES:
        return f"dq_mode must be one of {', '.join(_DQ_MODES)}, not {config.dq_mode}"
    if config.dq_mode == "dq_warpgroup" and (config.block_m, widest) != (64, 64):
        return "dq_mode dq_warpgroup needs blocks of 64 queries and heads at most 64 wide"
    if config.dq_mode == "tma_reduce" and config.block_m != 128:
        return "dq_mode tma_reduce needs blocks of 128 queries"
    if config.split_heads and not can_split(shape):
        return no_split(shape)
    kv_bytes = config.kv_stages * 2 * 128 * (head_dim + value_dim)
    q_bytes = config.num_stages * config.block_m * (2 * (head_dim + value_dim) + 8)  # Q, dO, LSE, delta
    ds_bytes = 0 if config.dq_mode == "dq_kernel" else 2 * 2 * 128 * config.block_m
    dq_bytes = 4 * config.block_m * head_dim if config.dq_mode == "tma_reduce" else 0
    return _fits(config, device, kv_bytes + q_bytes + ds_bytes + dq_bytes)


def _fits(config: object, device: Device, tile_bytes: int) -> str | None:
    needed = tile_bytes + BARRIER_BYTES
    if needed > device.shared_per_block:
        return f"{config} needs {needed} bytes of shared memory; a block has {device.shared_per_block}"
    return None


def _heuristic(device: Device, shape: Mapping[str, int]) -> BackwardConfig:
    # What triton 3.9 makes of the kernel needs more registers: two choices would spill in the loop.
    fewer_registers = (triton_version() or (0, 0)) >= (3, 9)
    visible = shape["mean_visible_keys"]
    if max(block(shape["head_dim"]), block(shape["value_dim"])) == 64:
        if (
            visible <= _SHORT_CONTEXT
            or shape["has_tables"]
            or (fewer_registers and shape["masked"] and shape["group_size"] == 1)
        ):
            windowed = 2 * visible < shape["seqlen_k"]  # work tiles have few blocks
            stages = 4 if windowed else 3
            kv_stages = 1 if shape["has_tables"] else 2
            return BackwardConfig(
                64, stages, fold_lse=True, fold_delta=True, kv_stages=kv_stages, dq_mode="dq_warpgroup"
            )
        if shape["group_size"] > 1:  # the loop over heads takes the registers that the TMA reduction needs
            return BackwardConfig(128, 2, fold_lse=False, fold_delta=True)
        return BackwardConfig(128, 2, fold_lse=False, fold_delta=True, kv_stages=1, dq_mode="tma_reduce")
    # A second stage of K and V hides a work tile's prologue; long work tiles gain more from steps that are shorter.
    kv_stages = 2 if visible <= MEDIUM_CONTEXT and not fewer_registers and not shape["has_tables"] else 1
    return BackwardConfig(64, 2, fold_lse=True, fold_delta=True, kv_stages=kv_stages)


def _space(device: Device, shape: Mapping[str, int]) -> Iterator[BackwardConfig]:
    if shape.get("window"):
        yield WINDOW_CONFIG
    for block_m in (64, 128):
        for num_stages, kv_stages in ((2, 2), (3, 2), (2, 1), (3, 1)):
            for fold_lse, fold_delta in ((False, False), (False, True), (True, True)):
                for dq_mode in _DQ_MODES:
                    for split_heads in (False, True) if can_split(shape) else (False,):
                        yield BackwardConfig(
                            block_m, num_stages, fold_lse, fold_delta, kv_stages, dq_mode, split_heads
                        )  # fmt: skip


def _bucket(shape: Mapping[str, int]) -> tuple[int, ...]:
    return (*bucket(shape), int(shape.get("window", 0) > 0))


BACKWARD = Tunable("attention_hopper_backward", BackwardConfig, _heuristic, _space, _valid, _bucket)


@dataclass(frozen=True)
class WideBackwardConfig:
    """Launch config of heads wider than 128: `num_stages` blocks of 64 queries in flight, and `dq_mode` ("atomic" or
    "dq_kernel") and `split_heads` as in `BackwardConfig`."""

    num_stages: int
    dq_mode: str = "atomic"
    split_heads: bool = False
    block_n: ClassVar[int] = 64
    block_m: ClassVar[int] = 64
    kv_stages: ClassVar[int] = 1
    fold_lse: ClassVar[bool] = False
    fold_delta: ClassVar[bool] = False


def _wide_valid(config: WideBackwardConfig, device: Device, shape: Mapping[str, int]) -> str | None:
    head_dim, value_dim = block(shape["head_dim"]), block(shape["value_dim"])
    if max(head_dim, value_dim) > 256:
        return f"heads must be at most 256 wide, not {shape['head_dim']} and {shape['value_dim']}"
    if config.dq_mode not in ("atomic", "dq_kernel"):
        return f"dq_mode must be atomic or dq_kernel for heads wider than 128, not {config.dq_mode}"
    if config.split_heads and not can_split(shape):
        return no_split(shape)
    kv_bytes = 2 * 64 * (head_dim + value_dim)
    q_bytes = config.num_stages * (2 * 64 * (head_dim + value_dim) + 8 * 64)  # Q, dO, LSE, delta
    p_bytes, ds_bytes = 4 * 64 * 64, 0 if config.dq_mode == "dq_kernel" else 2 * 2 * 64 * 64
    return _fits(config, device, kv_bytes + q_bytes + p_bytes + ds_bytes)


def _wide_heuristic(device: Device, shape: Mapping[str, int]) -> WideBackwardConfig:
    narrow = block(shape["head_dim"]) + block(shape["value_dim"]) <= 384
    return WideBackwardConfig(3 if narrow else 2)


def _wide_space(device: Device, shape: Mapping[str, int]) -> Iterator[WideBackwardConfig]:
    for num_stages in (2, 3, 4):
        for dq_mode in ("atomic", "dq_kernel"):
            for split_heads in (False, True) if can_split(shape) else (False,):
                yield WideBackwardConfig(num_stages, dq_mode, split_heads)


WIDE_BACKWARD = Tunable(
    "attention_hopper_backward_wide", WideBackwardConfig, _wide_heuristic, _wide_space, _wide_valid, bucket
)
