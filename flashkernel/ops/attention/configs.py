"""Launch configs of the attention kernels: tile sizes, warps and stages, from the device and the head size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from flashkernel.core.device import Device
from flashkernel.core.tune import Tunable, power_of_2
from flashkernel.core.versions import triton_version

Valid = Callable[["Tiles", Device, Mapping[str, int]], "str | None"]


@dataclass(frozen=True)
class Tiles:
    """A tile of `rows` queries by `columns` keys."""

    rows: int
    columns: int
    warps: int
    stages: int


def _widths(shape: Mapping[str, int]) -> tuple[int, int]:
    """What a row of q or k, and one of v or o, take in a tile."""
    return max(16, power_of_2(shape["head_dim"])), max(16, power_of_2(shape["value_dim"]))


def _bucket(shape: Mapping[str, int]) -> tuple[int, ...]:
    return (
        power_of_2(shape["queries"]), power_of_2(shape["keys"]), power_of_2(shape["span"]), *_widths(shape),
        shape["bytes"], shape["gathers"],
    )  # fmt: skip


def _too_much(device: Device, shape: Mapping[str, int], config: Tiles, held: int, streamed: int) -> str | None:
    """Why elements held for the whole loop over tiles, and those in flight, do not fit in shared memory.

    In float32 probabilities go through it as well, and so does a bias; the tile that is multiplied is one of those in
    flight.
    """
    needed = (held + streamed * config.stages) * shape["bytes"]
    if shape["bytes"] == 4:
        pairs = config.rows * config.columns * (1 + shape["gathers"])
        full = (held + streamed * max(1, config.stages - 1) + pairs) * 4
        needed = max(needed, full) if device.arch >= 90 else full
    if device.shared_per_block == 0 or needed <= device.shared_per_block - 2048:
        return None
    return f"{config} needs {needed} bytes of shared memory; a block has {device.shared_per_block}"


def _forward_valid(config: Tiles, device: Device, shape: Mapping[str, int]) -> str | None:
    width, values = _widths(shape)
    return _too_much(device, shape, config, config.rows * width, config.columns * (width + values))


def _queries_valid(config: Tiles, device: Device, shape: Mapping[str, int]) -> str | None:
    both = sum(_widths(shape))
    return _too_much(device, shape, config, config.rows * both, config.columns * both)


def _keys_valid(config: Tiles, device: Device, shape: Mapping[str, int]) -> str | None:
    both = sum(_widths(shape))
    return _too_much(device, shape, config, config.columns * both, config.rows * both)


def too_wide(device: Device, head_dim: int, value_dim: int, element_size: int) -> str | None:
    """Why not even the smallest tiles of such heads fit in a block's shared memory; None where they do."""
    shape = {"head_dim": head_dim, "value_dim": value_dim, "bytes": element_size, "gathers": 1}
    reasons = (valid(_SMALLEST, device, shape) for valid in (_forward_valid, _queries_valid, _keys_valid))
    return next((reason for reason in reasons if reason), None)


_SMALLEST = Tiles(16, 16, 8, 1)
# Tiles by head size: the best that were tried. On Hopper that is one warpgroup, and several programs on a
# multiprocessor: while one waits, the next computes.
_HOPPER = {
    "forward": {
        64: Tiles(64, 128, 4, 2), 128: Tiles(64, 64, 4, 3), 256: Tiles(128, 64, 8, 2), 512: Tiles(64, 16, 8, 1),
    },
    "queries": {
        64: Tiles(64, 64, 4, 3), 128: Tiles(128, 64, 8, 3), 256: Tiles(64, 32, 4, 2), 512: Tiles(32, 16, 8, 1),
    },
    "keys": {64: Tiles(64, 64, 4, 2), 128: Tiles(64, 64, 4, 2), 256: Tiles(32, 64, 4, 2), 512: Tiles(16, 16, 8, 1)},
}  # fmt: skip
# From triton 3.9 on: its code needs more registers, and would spill in the loop with the tiles above.
_HOPPER_LATER = {("keys", 128): Tiles(32, 64, 4, 2)}
# Where a tile of queries walks over few keys, up to so many: smaller tiles waste less at both ends.
_HOPPER_SHORT = {
    ("forward", 64): (1024, Tiles(64, 64, 4, 2)),
    ("queries", 64): (4096, Tiles(64, 32, 4, 3)),
    ("queries", 128): (1024, Tiles(64, 64, 4, 2)),
}
_AMPERE = {
    "forward": {64: Tiles(128, 64, 8, 2), 128: Tiles(64, 32, 4, 2), 256: Tiles(64, 32, 8, 1), 512: Tiles(32, 16, 8, 1)},
    "queries": {64: Tiles(64, 32, 8, 2), 128: Tiles(64, 32, 8, 1), 256: Tiles(32, 32, 8, 1), 512: Tiles(16, 16, 8, 1)},
    "keys": {64: Tiles(32, 64, 8, 2), 128: Tiles(32, 64, 8, 1), 256: Tiles(32, 32, 8, 1), 512: Tiles(16, 16, 8, 1)},
}  # fmt: skip


def _heuristic(kind: str, valid: Valid) -> Callable[[Device, Mapping[str, int]], Tiles]:
    def choose(device: Device, shape: Mapping[str, int]) -> Tiles:
        width = max(64, *_widths(shape))
        if device.arch < 90 and device.kind != "cpu":
            return _shrunk(_AMPERE[kind][width], device, shape, valid)
        usual = _HOPPER[kind][width]
        if (triton_version() or (0, 0)) >= (3, 9):
            usual = _HOPPER_LATER.get((kind, width), usual)
        most, short = _HOPPER_SHORT.get((kind, width), (0, usual))
        return _shrunk(short if shape["span"] <= most else usual, device, shape, valid)

    return choose


def _shrunk(choice: Tiles, device: Device, shape: Mapping[str, int], valid: Valid) -> Tiles:
    """No larger than the problem, and as small as the shared memory demands."""
    rows = min(choice.rows, max(16, power_of_2(shape["queries"])))
    columns = min(choice.columns, max(16, power_of_2(shape["keys"])))
    config = Tiles(rows, columns, choice.warps, choice.stages)
    while valid(config, device, shape) and (config.stages > 1 or max(config.rows, config.columns) > 16):
        if config.stages > 1:
            config = Tiles(config.rows, config.columns, config.warps, config.stages - 1)
        elif config.columns >= config.rows:
            config = Tiles(config.rows, config.columns // 2, config.warps, 1)
        else:
            config = Tiles(config.rows // 2, config.columns, config.warps, 1)
    return config


def _space(device: Device, shape: Mapping[str, int]) -> Iterator[Tiles]:
    for rows in (32, 64, 128):
        for columns in (32, 64, 128):
            for warps in (4, 8):
                for stages in (1, 2, 3, 4):
                    yield Tiles(rows, columns, warps, stages)


def _tunable(name: str, kind: str, valid: Valid) -> Tunable:
    return Tunable(name, Tiles, _heuristic(kind, valid), _space, valid, _bucket)


FORWARD = _tunable("attention_forward", "forward", _forward_valid)
BACKWARD_KEYS = _tunable("attention_backward_keys", "keys", _keys_valid)
BACKWARD_QUERIES = _tunable("attention_backward_queries", "queries", _queries_valid)
