"""Launch configs of the Hopper attention kernels: warpgroups, tiles and stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from flashkernel.core.device import Device
from flashkernel.core.tune import Tunable, power_of_2
from flashkernel.core.tune import head_block as block
from flashkernel.core.versions import triton_version

_SHORT_SPAN, _MEDIUM_SPAN = 384, 1024  # keys that a tile of queries sees
_SHORT_BACKWARD = 1024
_SUMS = ("halves", "sent", "apart")  # of dq
_BARRIERS = 1024  # bytes of shared memory for barriers and alignment
_LOADER_REGISTERS = 24
MOST_STAGES = 8  # of keys and values: named barriers that are free (core/gluon.py)


@dataclass(frozen=True)
class Forward:
    """`groups` warpgroups of 64 rows each, `pack` heads in a row of queries, against tiles of `columns` keys.

    With `overlap`, an item begins before the one before it has ended, which takes room for its queries.
    """

    groups: int
    columns: int
    stages: int
    pack: int
    registers: int
    overlap: bool = False

    @property
    def rows(self) -> int:
        """Queries of a warpgroup."""
        return 64 // self.pack


def shares_output(config: Forward, head_dim: int, value_dim: int) -> bool:
    """Whether the output must leave through the queries' buffer, for want of room."""
    return block(head_dim) == block(value_dim) == 256


def _forward_bytes(config: Forward, shape: Mapping[str, int]) -> int:
    width, values = block(shape["head_dim"]), block(shape["value_dim"])
    held = (2 if config.overlap else 1) * width
    held += 0 if shares_output(config, shape["head_dim"], shape["value_dim"]) else values
    return 2 * (config.groups * 64 * held + config.stages * config.columns * (width + values)) + _BARRIERS


def _forward_valid(config: Forward, device: Device, shape: Mapping[str, int]) -> str | None:
    needed = _forward_bytes(config, shape)
    if needed > device.shared_per_block:
        return f"{config} needs {needed} bytes of shared memory; a block has {device.shared_per_block}"
    if not 2 <= config.stages <= MOST_STAGES:
        return f"{config} must have 2 to {MOST_STAGES} stages"
    if config.overlap and shares_output(config, shape["head_dim"], shape["value_dim"]):
        return "items cannot overlap where the output leaves through the queries' buffer"
    if shape["group"] % config.pack:
        return f"{config.pack} heads cannot share a tile where {shape['group']} share their keys"
    given = 128 * (config.groups * config.registers + _LOADER_REGISTERS)
    if given > 65536 or config.registers % 8:
        return f"{config} needs {given} registers, in steps of 8 a thread; a multiprocessor has 65536"
    return None


def _packed(shape: Mapping[str, int]) -> int:
    """Heads in a row of queries: those that share their keys, as far as a power of two and 8 go."""
    return min(8, shape["group"] & -shape["group"])


def _forward_heuristic(device: Device, shape: Mapping[str, int]) -> Forward:
    width, pack = max(block(shape["head_dim"]), block(shape["value_dim"])), _packed(shape)
    if width > 128:
        return Forward(2, 64, 2, pack, 240)
    if width == 64 and shape["span"] <= _SHORT_SPAN and 2 * shape["span"] < shape["keys"]:
        # A window. With care, what a tile sees beyond it costs more than loading keys for fewer heads.
        return Forward(2, 64, 5, pack if shape["fixed_max"] else min(4, pack), 240, overlap=True)
    return (_fixed_max_config if shape["fixed_max"] else _online_config)(width, pack, shape)


def _fixed_max_config(width: int, pack: int, shape: Mapping[str, int]) -> Forward:
    """Tiles of 64 keys, which cost no more here than wider ones, leave registers for more warpgroups: while some begin
    or end, others multiply."""
    if shape["queries"] * pack <= 128:
        return Forward(2, 128, 2 if width == 128 else 4, pack, 240)
    few = pack == 1 and shape["keys"] <= _MEDIUM_SPAN  # items: how they come out even counts
    short = 2 * shape["keys"] <= _MEDIUM_SPAN
    if width == 64:
        # Three warpgroups seldom come out even; under a mask, the shortest walk is what they lack (`spare_first`).
        if few and short and shape["masked"]:
            return Forward(3, 64, 8, 1, 160, overlap=True)
        return Forward(4, 64, 8, pack, 112, overlap=True)
    if few and not shape["masked"]:
        return Forward(2, 64, 4, 1, 240, overlap=True) if short else Forward(2, 128, 2, 1, 240)
    return Forward(3, 64, 4, pack, 160)


def _online_config(width: int, pack: int, shape: Mapping[str, int]) -> Forward:
    """Narrow tiles find their largest scores more often: only for short walks."""
    if width == 64:
        short = shape["span"] <= _MEDIUM_SPAN
        return Forward(4, 64, 8, pack, 112, overlap=True) if short else Forward(3, 128, 3, pack, 160, overlap=True)
    if shape["span"] <= _SHORT_SPAN:
        return Forward(2, 64, 4, pack, 240, overlap=True)
    return Forward(2, 128, 2, pack, 240, overlap=pack == 1)  # packed, items are long


def _forward_space(device: Device, shape: Mapping[str, int]) -> Iterator[Forward]:
    for pack in sorted({1, _packed(shape)}):
        for groups, registers in ((2, 240), (3, 160), (4, 112)):
            for columns in (64, 128):
                for stages in (2, 3, 4, 6, 8):
                    for overlap in (False, True):
                        yield Forward(groups, columns, stages, pack, registers, overlap)


def _bucket(shape: Mapping[str, int]) -> tuple[int, ...]:
    return (
        power_of_2(shape["queries"]), power_of_2(shape["keys"]), power_of_2(shape["span"]), block(shape["head_dim"]),
        block(shape["value_dim"]), shape["group"], shape["fixed_max"], shape["masked"],
    )  # fmt: skip


FORWARD = Tunable("attention_hopper_forward", Forward, _forward_heuristic, _forward_space, _forward_valid, _bucket)


@dataclass(frozen=True)
class Backward:
    """Tiles of `rows` queries, `stages` of them in flight, against the keys and values of `held` items: with two, the
    next item's are loaded while this one is worked on.

    With `fold_norm`, S starts from -lse, and with `fold_delta` dP from -delta, which spares registers. `dq` is
    computed and added to a buffer by both warpgroups, in "halves" from registers or "sent" through shared memory, or by
    a third one, "apart".
    """

    rows: int
    stages: int
    fold_norm: bool
    fold_delta: bool
    held: int = 2
    dq: str = "halves"
    keys: ClassVar[int] = 128  # of an item


def _backward_valid(config: Backward, device: Device, shape: Mapping[str, int]) -> str | None:
    width, values = block(shape["head_dim"]), block(shape["value_dim"])
    if max(width, values) > 128:
        return f"heads must be at most 128 wide, not {shape['head_dim']} and {shape['value_dim']}"
    if config.rows == 128 and max(width, values) > 64:
        return "the registers hold tiles of 128 queries for heads at most 64 wide only"
    if config.dq not in _SUMS:
        return f"dq must be one of {', '.join(_SUMS)}, not {config.dq}"
    if config.dq == "apart" and (config.rows, max(width, values)) != (64, 64):
        return "a third warpgroup computes dq for tiles of 64 queries and heads at most 64 wide only"
    if config.dq == "sent" and config.rows != 128:
        return "dq goes through shared memory with tiles of 128 queries only"
    streamed = config.stages * config.rows * (2 * (width + values) + 8)
    kept = 2 * 2 * 128 * config.rows + (config.dq == "sent") * 4 * config.rows * width
    needed = config.held * 2 * 128 * (width + values) + streamed + kept + _BARRIERS
    if needed > device.shared_per_block:
        return f"{config} needs {needed} bytes of shared memory; a block has {device.shared_per_block}"
    return None


def _backward_heuristic(device: Device, shape: Mapping[str, int]) -> Backward:
    width = max(block(shape["head_dim"]), block(shape["value_dim"]))
    # What triton 3.9 makes of the kernel needs more registers: two choices would spill in the loop.
    fewer_registers = (triton_version() or (0, 0)) >= (3, 9)
    if width == 64:
        if shape["span"] <= _SHORT_BACKWARD or (fewer_registers and shape["masked"] and shape["group"] == 1):
            windowed = 2 * shape["span"] < shape["keys"]  # with items of few steps
            return Backward(64, 4 if windowed else 3, fold_norm=True, fold_delta=True, dq="apart")
        if shape["group"] > 1:  # the loop over heads takes the registers that sending needs
            return Backward(128, 2, fold_norm=False, fold_delta=True)
        return Backward(128, 2, fold_norm=False, fold_delta=True, held=1, dq="sent")
    # The second pair of buffers hides an item's beginning; long items have little of it, and steps that are shorter.
    held = 2 if shape["span"] <= _MEDIUM_SPAN and not fewer_registers else 1
    return Backward(64, 2, fold_norm=True, fold_delta=True, held=held)


def _backward_space(device: Device, shape: Mapping[str, int]) -> Iterator[Backward]:
    for rows in (64, 128):
        for stages, held in ((2, 2), (3, 2), (2, 1), (3, 1)):
            for norm, delta in ((False, False), (False, True), (True, True)):
                for dq in _SUMS:
                    yield Backward(rows, stages, norm, delta, held, dq)


BACKWARD = Tunable(
    "attention_hopper_backward", Backward, _backward_heuristic, _backward_space, _backward_valid, _bucket
)


@dataclass(frozen=True)
class Wide:
    """The backward pass of heads wider than 128: `stages` tiles of 64 queries in flight."""

    stages: int
    keys: ClassVar[int] = 64  # of an item
    rows: ClassVar[int] = 64
    dq: ClassVar[str] = "halves"
    fold_norm: ClassVar[bool] = False


def _wide_valid(config: Wide, device: Device, shape: Mapping[str, int]) -> str | None:
    width, values = block(shape["head_dim"]), block(shape["value_dim"])
    if max(width, values) > 256:
        return f"heads must be at most 256 wide, not {shape['head_dim']} and {shape['value_dim']}"
    streamed = config.stages * (2 * 64 * (width + values) + 8 * 64)
    handed_on = 4 * 64 * 64 + 2 * 2 * 64 * 64  # P in float32, dS twice
    needed = 2 * 64 * (width + values) + streamed + handed_on + _BARRIERS
    if needed > device.shared_per_block:
        return f"{config} needs {needed} bytes of shared memory; a block has {device.shared_per_block}"
    return None


def _wide_heuristic(device: Device, shape: Mapping[str, int]) -> Wide:
    narrow = block(shape["head_dim"]) + block(shape["value_dim"]) <= 384
    return Wide(3 if narrow else 2)


def _wide_space(device: Device, shape: Mapping[str, int]) -> Iterator[Wide]:
    for stages in (2, 3, 4):
        yield Wide(stages)


WIDE = Tunable("attention_hopper_backward_wide", Wide, _wide_heuristic, _wide_space, _wide_valid, _bucket)
