"""Launch configs of the Hopper attention forward kernel: consumer warpgroups, block sizes and pipeline stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from flashkernel.core.device import Device
from flashkernel.core.tune import Tunable
from flashkernel.core.tune import head_block as block
from flashkernel.ops.attention.hopper.shape_buckets import (
    BARRIER_BYTES,
    MEDIUM_CONTEXT,
    SHORT_CONTEXT,
    bucket,
    can_split,
    no_split,
)

PRODUCER_REGISTERS = 24  # per thread of the producer warp
MAX_STAGES = 8  # of K and V: as many named barriers are free (core/gluon.py)
MAX_PACKED_HEADS = 8
_SM_REGISTERS = 65536


@dataclass(frozen=True)
class WorkTile:
    """What the forward kernels of all dtypes choose.

    Attributes:
        num_consumers: consumer warpgroups, each of 64 rows of a work tile.
        block_n: keys of a K/V block.
        num_stages: K/V blocks in flight.
        pack_gqa: query heads in a work tile; a row is a query of one of them.
        consumer_registers: per thread of a consumer.
    """

    num_consumers: int
    block_n: int
    num_stages: int
    pack_gqa: int
    consumer_registers: int

    @property
    def block_m(self) -> int:
        """Queries of a consumer."""
        return 64 // self.pack_gqa


@dataclass(frozen=True)
class Forward(WorkTile):
    """Launch config of the forward kernel.

    Attributes:
        overlap: the first S = Q K^T of the next work tile is issued before this one ends. Takes a second Q buffer.
        split_heads: of heads such as 80, 96 or 192, only columns with data are multiplied (head_split.py).
        q_in_registers: S = Q K^T reads half of Q from registers, which saves a quarter of what it reads from shared
            memory. For heads padded to 256, without a mask.
    """

    overlap: bool = False
    split_heads: bool = False
    q_in_registers: bool = False

    @property
    def pad_front(self) -> bool:
        """True if consumers without queries are the first of a head: blocks are seldom a multiple of three."""
        return self.num_consumers == 3


def reuse_q_for_o(head_dim: int, value_dim: int) -> bool:
    """True if O is staged in the buffer of Q, because shared memory has no room for both."""
    return block(head_dim) == block(value_dim) == 256


def register_error(num_consumers: int, consumer_registers: int) -> str | None:
    """Returns why an SM cannot give the consumers and the producer so many registers, or None."""
    needed = 128 * (num_consumers * consumer_registers + PRODUCER_REGISTERS)
    if needed > _SM_REGISTERS or consumer_registers % 8:
        return f"it needs {needed} registers, in steps of 8 per thread; an SM has {_SM_REGISTERS}"
    return None


def _shared_bytes(config: Forward, shape: Mapping[str, int]) -> int:
    head_dim, value_dim = block(shape["head_dim"]), block(shape["value_dim"])
    row = (2 if config.overlap else 1) * head_dim  # of Q, and of O unless they share a buffer
    row += 0 if reuse_q_for_o(shape["head_dim"], shape["value_dim"]) else value_dim
    kv_elements = config.num_stages * config.block_n * (head_dim + value_dim)
    return 2 * (config.num_consumers * 64 * row + kv_elements) + BARRIER_BYTES


def _forward_valid(config: Forward, device: Device, shape: Mapping[str, int]) -> str | None:
    needed = _shared_bytes(config, shape)
    if needed > device.shared_per_block:
        return f"{config} needs {needed} bytes of shared memory; a block has {device.shared_per_block}"
    if not 2 <= config.num_stages <= MAX_STAGES:
        return f"{config} must have 2 to {MAX_STAGES} stages"
    if config.split_heads and not can_split(shape):
        return no_split(shape)
    if config.q_in_registers and (block(shape["head_dim"]) != 256 or config.overlap or config.split_heads):
        return "q_in_registers is for heads padded to 256, without overlap and split_heads"
    if config.q_in_registers and shape["masked"]:
        return "with a mask there are no registers left for Q"
    if config.overlap and reuse_q_for_o(shape["head_dim"], shape["value_dim"]):
        return "work tiles cannot overlap if O is staged in the buffer of Q"
    if shape["group_size"] % config.pack_gqa:
        return f"{config.pack_gqa} heads cannot share a work tile if {shape['group_size']} share a kv head"
    error = register_error(config.num_consumers, config.consumer_registers)
    return None if error is None else f"{config}: {error}"


def packed_heads(group_size: int) -> int:
    """Returns how many query heads share a work tile: the largest power of two that divides group_size, at most 8."""
    return min(MAX_PACKED_HEADS, group_size & -group_size)


def _forward_heuristic(device: Device, shape: Mapping[str, int]) -> Forward:
    head_dim, pack_gqa = max(block(shape["head_dim"]), block(shape["value_dim"])), packed_heads(shape["group_size"])
    if head_dim > 128:
        return Forward(2, 64, 2, pack_gqa, 240)
    visible = shape["mean_visible_keys"]
    if head_dim == 64 and visible <= SHORT_CONTEXT and 2 * visible < shape["seqlen_k"]:
        # A sliding window. With the online softmax, the blocks that a packed tile visits beyond the window cost more
        # than loading K and V for fewer heads.
        return Forward(2, 64, 5, pack_gqa if shape["fixed_max"] else min(4, pack_gqa), 240, overlap=True)
    return (_fixed_max_config if shape["fixed_max"] else _online_config)(head_dim, pack_gqa, shape)


def _fixed_max_config(head_dim: int, pack_gqa: int, shape: Mapping[str, int]) -> Forward:
    """Without row maxima, blocks of 64 keys cost no more than wider ones and leave registers for more consumers: while
    some are in their prologue or epilogue, others keep the tensor cores busy."""
    if shape["seqlen_q"] * pack_gqa <= 128:
        return Forward(2, 128, 2 if head_dim == 128 else 4, pack_gqa, 240)
    few_tiles = pack_gqa == 1 and shape["seqlen_k"] <= MEDIUM_CONTEXT  # whether they fill the last wave counts
    short = 2 * shape["seqlen_k"] <= MEDIUM_CONTEXT
    if head_dim == 64:
        # The number of blocks is seldom a multiple of three; under a mask the missing ones are the shortest
        # (`pad_front`).
        if few_tiles and short and shape["masked"]:
            return Forward(3, 64, 8, 1, 160, overlap=True)
        return Forward(4, 64, 8, pack_gqa, 112, overlap=True)
    if few_tiles and not shape["masked"]:
        return Forward(2, 64, 4, 1, 240, overlap=True) if short else Forward(2, 128, 2, 1, 240)
    return Forward(3, 64, 4, pack_gqa, 160)


def _online_config(head_dim: int, pack_gqa: int, shape: Mapping[str, int]) -> Forward:
    """Narrow K blocks update the row max more often: only where few keys are visible."""
    visible = shape["mean_visible_keys"]
    if head_dim == 64 and shape["has_tables"]:  # reading them takes registers
        return Forward(3, 64, 6, pack_gqa, 160, overlap=True)
    if head_dim == 64:
        if visible <= MEDIUM_CONTEXT:
            return Forward(4, 64, 8, pack_gqa, 112, overlap=True)
        return Forward(3, 128, 3, pack_gqa, 160, overlap=True)
    if visible <= SHORT_CONTEXT or shape["has_tables"]:
        return Forward(2, 64, 4, pack_gqa, 240, overlap=True)
    return Forward(2, 128, 2, pack_gqa, 240, overlap=pack_gqa == 1)  # packed work tiles are long


def _forward_space(device: Device, shape: Mapping[str, int]) -> Iterator[Forward]:
    for pack_gqa in sorted({1, packed_heads(shape["group_size"])}):
        for num_consumers, registers in ((2, 240), (3, 160), (4, 112)):
            for block_n in (64, 128):
                for num_stages in (2, 3, 4, 6, 8):
                    for overlap in (False, True):
                        for split_heads in (False, True) if can_split(shape) else (False,):
                            yield Forward(
                                num_consumers, block_n, num_stages, pack_gqa, registers, overlap, split_heads
                            )  # fmt: skip
        if block(shape["head_dim"]) == 256 and not shape["masked"]:
            yield Forward(2, 64, 2, pack_gqa, 240, q_in_registers=True)


FORWARD = Tunable("attention_hopper_forward", Forward, _forward_heuristic, _forward_space, _forward_valid, bucket)
