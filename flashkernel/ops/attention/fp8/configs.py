"""Launch configs of the FP8 attention kernels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from flashkernel.core.device import Device
from flashkernel.core.tune import Tunable, power_of_2
from flashkernel.core.versions import triton_version
from flashkernel.ops.attention.configs import Tiles
from flashkernel.ops.attention.hopper.configs import MOST_STAGES

_BARRIERS = 1024  # bytes of shared memory for barriers and alignment
_LOADER_REGISTERS = 24


@dataclass(frozen=True)
class Hopper:
    """`groups` warpgroups of 64 rows each, `pack` heads in a row of queries, against tiles of `columns` keys.

    `polynomial` of every eight exponentials are computed where multiplications are. A `lazy` walk looks for the
    largest score in its first tile, and later only at sums.
    """

    groups: int
    columns: int
    stages: int
    pack: int
    registers: int
    polynomial: int = 0
    lazy: bool = False

    @property
    def rows(self) -> int:
        """Queries of a warpgroup."""
        return 64 // self.pack


def _hopper_valid(config: Hopper, device: Device, shape: Mapping[str, int]) -> str | None:
    width = shape["head_dim"]
    held = config.groups * 64 * width * (1 + shape["out_bytes"])
    needed = held + 2 * config.stages * config.columns * width + _BARRIERS
    if needed > device.shared_per_block:
        return f"{config} needs {needed} bytes of shared memory; a block has {device.shared_per_block}"
    if not 2 <= config.stages <= MOST_STAGES or not 0 <= config.polynomial <= 8:
        return f"{config} must have 2 to {MOST_STAGES} stages, and 0 to 8 of every 8 exponentials by a polynomial"
    if config.lazy and config.columns > 128:
        return f"{config} must have tiles of 64 or 128 keys, to rescale their weights in one go"
    if shape["group"] % config.pack:
        return f"{config.pack} heads cannot share a tile where {shape['group']} share their keys"
    if shape["blocked"] and config.columns > 128:
        return f"a tile of {config.columns} keys has more than one scale"
    given = 128 * (config.groups * config.registers + _LOADER_REGISTERS)
    if given > 65536 or config.registers % 8:
        return f"{config} needs {given} registers, in steps of 8 a thread; a multiprocessor has 65536"
    return None


def _packed(shape: Mapping[str, int]) -> int:
    """Heads in a row of queries: those that share their keys, as far as a power of two and 8 go."""
    return min(8, shape["group"] & -shape["group"])


def _hopper_heuristic(device: Device, shape: Mapping[str, int]) -> Hopper:
    pack = _packed(shape)
    if shape["head_dim"] == 64 and shape["span"] <= 384:
        return Hopper(3, 64, 4, pack, 160, lazy=True)
    # What triton 3.9 makes of three warpgroups under a mask would spill in the loop.
    if shape["head_dim"] == 64 and (triton_version() or (0, 0)) < (3, 9):
        return Hopper(3, 128, 4, pack, 160, lazy=True)
    return Hopper(2, 128, 4, pack, 240, lazy=True)


def _hopper_space(device: Device, shape: Mapping[str, int]) -> Iterator[Hopper]:
    for pack in sorted({1, _packed(shape)}):
        for groups, registers in ((2, 240), (3, 160)):
            for columns in (64, 128, 256):
                for polynomial in (0, 1, 2):
                    for lazy in (False, True):
                        yield Hopper(groups, columns, 2 if columns > 128 else 4, pack, registers, polynomial, lazy)


def _hopper_bucket(shape: Mapping[str, int]) -> tuple[int, ...]:
    return (
        power_of_2(shape["queries"]), power_of_2(shape["span"]), shape["head_dim"], shape["group"], shape["out_bytes"],
        shape["blocked"],
    )  # fmt: skip


HOPPER = Tunable("attention_fp8_hopper", Hopper, _hopper_heuristic, _hopper_space, _hopper_valid, _hopper_bucket)


def _tiles(device: Device, shape: Mapping[str, int]) -> Tiles:
    wide = max(shape["head_dim"], shape["value_dim"]) > 128
    rows = min(64, max(16, power_of_2(shape["queries"])))
    columns = min(32 if wide else 64, max(16, power_of_2(shape["keys"])))
    return Tiles(rows, columns, 4, 2)


def _tiles_valid(config: Tiles, device: Device, shape: Mapping[str, int]) -> str | None:
    if config.columns > 128:
        return f"a tile of {config.columns} keys has more than one scale"
    width = power_of_2(max(32, shape["head_dim"], shape["value_dim"]))
    needed = width * (config.rows + 3 * config.columns * config.stages)  # values are staged as they are, and widened
    if device.shared_per_block and needed > device.shared_per_block:
        return f"{config} needs {needed} bytes of shared memory; a block has {device.shared_per_block}"
    return None


def _tiles_space(device: Device, shape: Mapping[str, int]) -> Iterator[Tiles]:
    for rows in (64, 128):
        for columns in (32, 64, 128):
            for warps in (4, 8):
                for stages in (1, 2, 3):
                    yield Tiles(rows, columns, warps, stages)


def _tiles_bucket(shape: Mapping[str, int]) -> tuple[int, ...]:
    return (
        power_of_2(shape["queries"]), power_of_2(shape["keys"]), power_of_2(max(32, shape["head_dim"])),
        power_of_2(shape["value_dim"]),
    )  # fmt: skip


TRITON = Tunable("attention_fp8", Tiles, _tiles, _tiles_space, _tiles_valid, _tiles_bucket)
