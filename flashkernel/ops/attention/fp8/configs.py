"""Launch configs of the FP8 attention kernels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from flashkernel.core.device import Device
from flashkernel.core.tune import Tunable, power_of_2
from flashkernel.core.versions import triton_version
from flashkernel.ops.attention.configs import AttentionConfig
from flashkernel.ops.attention.hopper.forward_configs import MAX_STAGES, WorkTile, packed_heads, register_error
from flashkernel.ops.attention.hopper.shape_buckets import BARRIER_BYTES, SHORT_CONTEXT


@dataclass(frozen=True)
class HopperFp8(WorkTile):
    """Launch config of the Hopper FP8 kernel.

    Attributes:
        polynomial_exp2: so many of every 8 exponentials are computed by FMAs instead of the SFU.
        lazy_rescale: only the first K block's row max is computed; later blocks rescale a row only if its sums say that
            P may leave the range of e4m3.
    """

    polynomial_exp2: int = 0
    lazy_rescale: bool = False


def _hopper_valid(config: HopperFp8, device: Device, shape: Mapping[str, int]) -> str | None:
    head_dim = shape["head_dim"]
    q_and_o = config.num_consumers * 64 * head_dim * (1 + shape["out_bytes"])
    needed = q_and_o + 2 * config.num_stages * config.block_n * head_dim + BARRIER_BYTES
    if needed > device.shared_per_block:
        return f"{config} needs {needed} bytes of shared memory; a block has {device.shared_per_block}"
    if not 2 <= config.num_stages <= MAX_STAGES or not 0 <= config.polynomial_exp2 <= 8:
        return f"{config} must have 2 to {MAX_STAGES} stages, and 0 to 8 of every 8 exponentials by a polynomial"
    if config.lazy_rescale and config.block_n > 128:
        return f"{config} must have K blocks of 64 or 128 keys, to rescale P in one instruction sequence"
    if shape["group_size"] % config.pack_gqa:
        return f"{config.pack_gqa} heads cannot share a work tile if {shape['group_size']} share a kv head"
    if shape["block_scales"] and config.block_n > 128:
        return f"a K block of {config.block_n} keys has more than one scale"
    error = register_error(config.num_consumers, config.consumer_registers)
    return None if error is None else f"{config}: {error}"


def _hopper_heuristic(device: Device, shape: Mapping[str, int]) -> HopperFp8:
    pack_gqa = packed_heads(shape["group_size"])
    if shape["head_dim"] == 64 and shape["mean_visible_keys"] <= SHORT_CONTEXT:
        return HopperFp8(3, 64, 4, pack_gqa, 160, lazy_rescale=True)
    # Compiled by triton 3.9, three consumers would spill registers in the main loop under a mask.
    if shape["head_dim"] == 64 and (triton_version() or (0, 0)) < (3, 9):
        return HopperFp8(3, 128, 4, pack_gqa, 160, lazy_rescale=True)
    return HopperFp8(2, 128, 4, pack_gqa, 240, lazy_rescale=True)


def _hopper_space(device: Device, shape: Mapping[str, int]) -> Iterator[HopperFp8]:
    for pack_gqa in sorted({1, packed_heads(shape["group_size"])}):
        for num_consumers, registers in ((2, 240), (3, 160)):
            for block_n in (64, 128, 256):
                for polynomial in (0, 1, 2):
                    for lazy in (False, True):
                        stages = 2 if block_n > 128 else 4
                        yield HopperFp8(num_consumers, block_n, stages, pack_gqa, registers, polynomial, lazy)


def _hopper_bucket(shape: Mapping[str, int]) -> tuple[int, ...]:
    return (
        power_of_2(shape["seqlen_q"]), power_of_2(shape["mean_visible_keys"]), shape["head_dim"], shape["group_size"],
        shape["out_bytes"], shape["block_scales"],
    )  # fmt: skip


HOPPER = Tunable("attention_fp8_hopper", HopperFp8, _hopper_heuristic, _hopper_space, _hopper_valid, _hopper_bucket)


def _tiles(device: Device, shape: Mapping[str, int]) -> AttentionConfig:
    wide = max(shape["head_dim"], shape["value_dim"]) > 128
    rows = min(64, max(16, power_of_2(shape["seqlen_q"])))
    columns = min(32 if wide else 64, max(16, power_of_2(shape["seqlen_k"])))
    return AttentionConfig(rows, columns, 4, 2)


def _tiles_valid(config: AttentionConfig, device: Device, shape: Mapping[str, int]) -> str | None:
    if config.block_n > 128:
        return f"a tile of {config.block_n} keys has more than one scale"
    width = power_of_2(max(32, shape["head_dim"], shape["value_dim"]))
    needed = width * (config.block_m + 3 * config.block_n * config.num_stages)  # values are staged, and widened
    if device.shared_per_block and needed > device.shared_per_block:
        return f"{config} needs {needed} bytes of shared memory; a block has {device.shared_per_block}"
    return None


def _tiles_space(device: Device, shape: Mapping[str, int]) -> Iterator[AttentionConfig]:
    for rows in (64, 128):
        for columns in (32, 64, 128):
            for warps in (4, 8):
                for stages in (1, 2, 3):
                    yield AttentionConfig(rows, columns, warps, stages)


def _tiles_bucket(shape: Mapping[str, int]) -> tuple[int, ...]:
    return (
        power_of_2(shape["seqlen_q"]), power_of_2(shape["seqlen_k"]), power_of_2(max(32, shape["head_dim"])),
        power_of_2(shape["value_dim"]),
    )  # fmt: skip


TRITON = Tunable("attention_fp8", AttentionConfig, _tiles, _tiles_space, _tiles_valid, _tiles_bucket)
