"""Launch configs of the Hopper kernel of dQ alone: query tiles and the K/V pipeline, as in the forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from flashkernel.core.device import Device
from flashkernel.core.tune import Tunable
from flashkernel.core.tune import head_block as block
from flashkernel.ops.attention.hopper.forward_configs import Forward, packed_heads, register_error
from flashkernel.ops.attention.hopper.shape_buckets import BARRIER_BYTES, bucket, can_split, no_split

_MAX_STAGES = 4  # with more, K and V of a stage share a named barrier; here V is released before K


def _valid(config: Forward, device: Device, shape: Mapping[str, int]) -> str | None:
    if config.overlap:
        return "work tiles do not overlap: dQ leaves through the buffer of Q"
    if config.split_heads and not can_split(shape):
        return no_split(shape)
    if not 2 <= config.num_stages <= _MAX_STAGES:
        return f"{config} must have 2 to {_MAX_STAGES} stages"
    if shape["group_size"] % config.pack_gqa:
        return f"{config.pack_gqa} heads cannot share a work tile if {shape['group_size']} share a kv head"
    columns = block(shape["head_dim"]) + block(shape["value_dim"])  # of Q and dO, of K and V
    rows = config.num_consumers * 64 + config.num_stages * config.block_n
    needed = 2 * rows * columns + BARRIER_BYTES
    if needed > device.shared_per_block:
        return f"{config} needs {needed} bytes of shared memory; a block has {device.shared_per_block}"
    error = register_error(config.num_consumers, config.consumer_registers)
    return None if error is None else f"{config}: {error}"


def _heuristic(device: Device, shape: Mapping[str, int]) -> Forward:
    head_dim, value_dim = block(shape["head_dim"]), block(shape["value_dim"])
    pack_gqa = packed_heads(shape["group_size"])
    if max(head_dim, value_dim) == 64:
        return Forward(3, 64, 4, pack_gqa, 160)
    if max(head_dim, value_dim) == 128:
        return Forward(2, 64, 4, pack_gqa, 240)
    # Q and dO of 128 rows take half of shared memory, and dQ half of the registers.
    return Forward(2, 32, 3, pack_gqa, 240)


def _space(device: Device, shape: Mapping[str, int]) -> Iterator[Forward]:
    for pack_gqa in sorted({1, packed_heads(shape["group_size"])}):
        for num_consumers, registers in ((2, 240), (3, 160)):
            for block_n in (32, 64, 128):
                for num_stages in (2, 3, 4):
                    for split_heads in (False, True) if can_split(shape) else (False,):
                        yield Forward(num_consumers, block_n, num_stages, pack_gqa, registers, False, split_heads)


BACKWARD_DQ = Tunable("attention_hopper_backward_dq", Forward, _heuristic, _space, _valid, bucket)
