"""Launch configs of the grouped products on Hopper, and the cost rule that chooses one.

The host knows the number of rows and of groups, not how the rows divide among the groups. The rule estimates the clock
cycles of every candidate for groups of equal size and takes the cheapest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from flashkernel.core.device import Device
from flashkernel.core.tune import Tunable, ceil_div, power_of_2
from flashkernel.ops.matmul.hopper.configs import HopperTile

MAX_STAGES = 8  # as many named barriers are free (core/gluon.py)
_CHUNK_BYTES = 16384  # of shared memory, per consumer, in which chunks are staged for TMA, or change their layout
_RESERVED_BYTES = 2048  # mbarriers, alignment of the buffers, sums over groups
_MMA_RATE = 4096  # bytes of K, times rows and columns: per clock cycle and SM
_L2_RATE = 56  # bytes per clock cycle and SM
_MEMORY_RATE = 18  # bytes of device memory per clock cycle and SM
_TILE_CYCLES = 1500  # of an epilogue's and a pipeline's start, whatever their size
_STORE_RATE = 16  # elements of y per clock cycle


@dataclass(frozen=True)
class HopperGrouped(HopperTile):
    """Launch config of a grouped product, or of the weights' gradient, on Hopper."""


def _stage_bytes(config: HopperGrouped) -> int:
    return (config.block_m + config.block_n) * 128


def _shared_bytes(config: HopperGrouped) -> int:
    return config.num_stages * _stage_bytes(config) + config.num_consumers * _CHUNK_BYTES + _RESERVED_BYTES


def _valid(config: HopperGrouped, device: Device, shape: Mapping[str, int]) -> str | None:
    needed = _shared_bytes(config)
    if needed > device.shared_per_block:
        return f"{config} needs {needed} bytes of shared memory; a block has {device.shared_per_block}"
    if config.rows not in (64, 128) or config.block_n not in (64, 128, 256) or config.num_consumers not in (1, 2):
        return f"{config}: a work tile has one or two consumers of 64 or 128 rows and 64, 128 or 256 columns"
    if config.rows * config.block_n > 64 * 256:
        return f"{config}: an accumulator of {config.rows} x {config.block_n} does not fit into the registers"
    if shape["halves"] and (config.rows != 64 or config.block_n == 64):
        return f"{config}: gate and up have an accumulator each, 64 rows by at least 64 columns"
    if not 2 <= config.num_stages <= MAX_STAGES:
        return f"{config} must have 2 to {MAX_STAGES} stages"
    return None


def _with_most_stages(config: HopperGrouped, device: Device) -> HopperGrouped:
    left = device.shared_per_block - _shared_bytes(replace(config, num_stages=0))
    return replace(config, num_stages=max(2, min(MAX_STAGES, left // _stage_bytes(config))))


def _tile_shapes() -> Iterator[HopperGrouped]:
    yield HopperGrouped(64, 256, 2, 0)
    yield HopperGrouped(64, 128, 2, 0)
    yield HopperGrouped(128, 128, 2, 0)


def tail_columns(columns: int, block_n: int) -> int:
    """Returns the columns to multiply of the last tile of a row, a power of two; 0 if they are more than half.

    A row of one tile has no narrow one: Triton takes the number of tiles for a constant then, and fails to compile it.
    """
    rest = columns % block_n
    needed = max(64, power_of_2(rest))
    return needed if rest > 0 and columns > block_n and needed <= block_n // 2 else 0


def _cycles(config: HopperGrouped, device: Device, shape: Mapping[str, int]) -> float:
    """Returns about how many clock cycles a call takes if all groups have about the same number of rows."""
    each = shape["rows"] / max(1, shape["groups"])  # rows of a group
    groups = min(shape["groups"], shape["rows"])  # of few rows, not every group has one
    n_tiles = ceil_div(shape["n"], config.block_n)
    tail = 0 if shape["halves"] else tail_columns(shape["n"], config.block_n)
    columns = config.block_n * (1 if not tail else (n_tiles - 1 + tail / config.block_n) / n_tiles)  # of a work tile
    if shape["weight_gradient"]:
        steps = each * shape["bytes"] / 128 + 0.5
        row_tiles = ceil_div(shape["k"], config.block_m)
        tiles = float(shape["groups"] * row_tiles * n_tiles)
        rows = ceil_div(shape["k"], config.rows) * config.rows / row_tiles  # of a work tile
    else:
        steps = ceil_div(shape["k"] * shape["bytes"], 128)
        row_tiles_each = max(1.0, each / config.block_m + 0.5)  # groups end anywhere in their last tile
        tiles = groups * row_tiles_each * n_tiles
        rows = max(float(config.rows), each + config.rows / 2) / row_tiles_each
    products = rows * columns * 128 / _MMA_RATE
    loads = (rows + columns) * 128 / _L2_RATE
    epilogue = _TILE_CYCLES + rows * columns / _STORE_RATE
    waves = max(1.0, tiles / device.sms + 0.5)
    # Each weight is read from device memory once; with few rows that takes longer than all else.
    weights = groups * shape["k"] * shape["n"] * shape["bytes"]
    memory = weights / (device.sms * _MEMORY_RATE) * waves * device.sms / max(1.0, tiles)
    return max(waves * (steps * max(products, loads) + epilogue), memory)


def _candidates(device: Device, shape: Mapping[str, int]) -> list[HopperGrouped]:
    configs = [_with_most_stages(config, device) for config in _tile_shapes()]
    return [config for config in configs if _valid(config, device, shape) is None]


def _heuristic(device: Device, shape: Mapping[str, int]) -> HopperGrouped:
    return min(_candidates(device, shape), key=lambda config: _cycles(config, device, shape))


def _space(device: Device, shape: Mapping[str, int]) -> Iterator[HopperGrouped]:
    for config in _candidates(device, shape):
        yield config
        yield replace(config, num_stages=config.num_stages - 1)


def _bucket(shape: Mapping[str, int]) -> tuple[int, ...]:
    names = ("groups", "n", "k", "bytes", "weight_gradient", "halves")
    return (power_of_2(shape["rows"]), *(shape[name] for name in names))


HOPPER_GROUPED = Tunable("grouped_matmul_hopper", HopperGrouped, _heuristic, _space, _valid, _bucket)
