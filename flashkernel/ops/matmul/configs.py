"""Launch configs of the matrix product kernels in Triton, and the cost rule that chooses tiles and split-K.

A tile's time is the larger of what its products and its loads take; a launch's time is that of its longest SM. Split-K
divides the sum of each tile among several programs where tiles alone leave SMs idle; the partial sums go through device
memory, which the rule charges for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from flashkernel.core.device import Device
from flashkernel.core.tune import Tunable, ceil_div, power_of_2

MAX_SPLITS = 16
MAX_GROUPS = 4096  # groups of a grouped product: every program reads all offsets


@dataclass(frozen=True)
class MatmulConfig:
    """A program computes tiles of `block_m` x `block_n`, `block_k` elements of the sum at a time.

    Attributes:
        group_m: Tile order: so many tiles along M share their tiles of B before the next column (L2 reuse).
        splits: Programs that share the sum of each tile; their partial sums are added in a fixed order.
        persistent: One program per SM computes several tiles.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    splits: int = 1
    persistent: bool = False


# Tiles of 16-bit operands with the share of the tensor cores' rate that they reach on long sums: larger tiles load
# less for each product. block_k is halved for float32 and doubled for 8-bit operands.
_TILES: dict[int, tuple[tuple[MatmulConfig, float], ...]] = {
    90: (
        (MatmulConfig(128, 256, 64, 8, 3), 1.0),
        (MatmulConfig(256, 128, 64, 8, 3), 1.0),
        (MatmulConfig(128, 128, 64, 4, 4), 0.85),
        (MatmulConfig(64, 256, 64, 4, 4), 0.8),
        (MatmulConfig(64, 128, 64, 4, 4), 0.65),
        (MatmulConfig(64, 64, 64, 4, 4), 0.45),
    ),
    80: (
        (MatmulConfig(128, 256, 32, 8, 3), 1.0),
        (MatmulConfig(128, 128, 32, 4, 4), 0.95),
        (MatmulConfig(64, 128, 32, 4, 4), 0.75),
        (MatmulConfig(64, 64, 64, 4, 3), 0.6),
        (MatmulConfig(32, 64, 64, 4, 4), 0.4),
    ),
}
_INTERPRETED = MatmulConfig(32, 32, 32, 4, 2)
_RATE = {80: 1024, 90: 2048}  # products of 16-bit operands that an SM adds in a clock
_BYTES_PER_CLOCK = 20  # of device memory, for each SM
_LAUNCH_CLOCKS = 5000  # of the kernel that adds partial sums


def _generation(device: Device) -> int:
    return 90 if device.arch >= 90 else 80


def fitted(config: MatmulConfig, device: Device, shape: Mapping[str, int]) -> MatmulConfig:
    """A 16-bit tile for a shape's operands, with the stages that shared memory has room for.

    With block scales a tile has two accumulators, one for the sum of a block and one for all; operands whose rows are
    not 16 bytes apart are loaded element by element through registers; the gradient of an activation ("dact") has
    several tiles at once; without TMA, addresses of gate's and up's tiles take registers. All take smaller tiles and 8
    warps.
    """
    size = shape["bytes"]
    crowded = shape["blocks"] or not shape["aligned"] or shape.get("dact", False)
    crowded = crowded or (shape.get("gated", False) and device.arch < 90)
    if crowded and config.block_m * config.block_n >= 128 * 128:
        config = replace(config, block_m=128, block_n=128, num_warps=8)
    if (shape.get("gated", False) or shape.get("dact", False)) and not shape["aligned"]:
        config = replace(config, block_m=min(config.block_m, 64))
    if size == 4:  # products by tf32, whose accumulators and operands need more registers
        wide = config.block_m * config.block_n > 128 * 128
        config = replace(config, block_k=32, block_n=128 if wide else config.block_n,
                         block_m=min(config.block_m, 128), num_warps=8 if wide else config.num_warps)  # fmt: skip
    elif size == 1:
        config = replace(config, block_k=128 if device.arch >= 89 else 64)
    if not shape["aligned"]:
        config = replace(config, block_k=min(config.block_k, 32))
    while config.num_stages > 2 and _shared(config, device, size) > device.shared_per_block:
        config = replace(config, num_stages=config.num_stages - 1)
    return config


def _shared(config: MatmulConfig, device: Device, size: int) -> int:
    """Shared memory of the staged operands, and of a 16-bit output tile on its way out by TMA."""
    staged = (config.block_m + config.block_n) * config.block_k * size * config.num_stages
    return staged + (config.block_m * config.block_n * 2 if device.arch >= 90 else 0)


def _clocks(config: MatmulConfig, share: float, device: Device, shape: Mapping[str, int]) -> float:
    tiles = ceil_div(shape["m"], config.block_m) * ceil_div(shape["n"], config.block_n) * shape["batch"]
    steps = ceil_div(ceil_div(shape["k"], config.block_k), config.splits)
    rate = _RATE[_generation(device)] * share * 2 / max(1, shape["bytes"])
    each = config.block_m * config.block_n * (steps + 2) * config.block_k / rate  # two steps fill the pipeline
    waves = ceil_div(tiles * config.splits, device.sms)
    moved = shape["m"] * shape["n"] * shape["batch"] * 4 * 2 * config.splits if config.splits > 1 else 0
    return waves * each + moved / device.sms / _BYTES_PER_CLOCK + (_LAUNCH_CLOCKS if config.splits > 1 else 0)


def _heuristic(device: Device, shape: Mapping[str, int]) -> MatmulConfig:
    if device.kind == "cpu":
        return _INTERPRETED
    best, least = None, float("inf")
    for tile, share in _TILES[_generation(device)]:
        config = fitted(tile, device, shape)
        for splits in (1, 2, 3, 4, 6, 8, MAX_SPLITS):
            if splits > 1 and ceil_div(shape["k"], config.block_k) < 4 * splits:
                break
            candidate = replace(config, splits=splits)
            clocks = _clocks(candidate, share, device, shape)
            if clocks < least * 0.999:
                best, least = candidate, clocks
    assert best is not None
    return best


def _space(device: Device, shape: Mapping[str, int]) -> Iterator[MatmulConfig]:
    for tile, _ in _TILES[_generation(device)]:
        for stages in (2, 3, 4):
            for group_m in (4, 8, 16):
                for splits in (1, 2, 4, 8):
                    for persistent in (False, True):
                        yield replace(
                            fitted(tile, device, shape),
                            num_stages=stages, group_m=group_m, splits=splits, persistent=persistent,
                        )  # fmt: skip


def _valid(config: MatmulConfig, device: Device, shape: Mapping[str, int]) -> str | None:
    for name in ("block_m", "block_n", "block_k"):
        size = getattr(config, name)
        if size < 16 or size != power_of_2(size):
            return f"{name} is {size}; tensor cores take powers of two of at least 16"
    if not 1 <= config.splits <= MAX_SPLITS:
        return f"{config.splits} splits; there are 1 to {MAX_SPLITS}"
    if shape["blocks"] and config.block_k > 128:
        return f"block_k is {config.block_k}; a block of scales has 128 elements of K"
    needed = _shared(config, device, shape["bytes"])
    if device.shared_per_block and needed > device.shared_per_block:
        return f"{config} needs {needed} bytes of shared memory; a block has {device.shared_per_block}"
    return None


def _bucket(shape: Mapping[str, int]) -> tuple[int, ...]:
    names = ("m", "n", "k", "batch", "bytes", "blocks", "aligned", "gated", "dact")
    return tuple(shape.get(name, False) for name in names)


MATMUL = Tunable("matmul", MatmulConfig, _heuristic, _space, _valid, _bucket)


def _grouped_heuristic(device: Device, shape: Mapping[str, int]) -> MatmulConfig:
    if device.kind == "cpu":
        return replace(_INTERPRETED, persistent=True)
    average = shape["rows"] // max(1, shape["groups"])  # rows of a group, which the host does not know
    # In a product of the weights' gradient both sides of a tile are features, and all rows are its sum.
    short = not shape["weight_gradient"] and average < 96
    tiles = [tile for tile, _ in _TILES[_generation(device)]]
    tile = fitted(next(tile for tile in tiles if tile.block_m == 64) if short else tiles[0], device, shape)
    return replace(tile, persistent=True)


def _grouped_valid(config: MatmulConfig, device: Device, shape: Mapping[str, int]) -> str | None:
    if config.splits != 1:
        return f"{config.splits} splits; grouped products have none"
    return _valid(config, device, shape)


def _grouped_space(device: Device, shape: Mapping[str, int]) -> Iterator[MatmulConfig]:
    for tile, _ in _TILES[_generation(device)]:
        for stages in (2, 3, 4):
            yield replace(fitted(tile, device, shape), num_stages=stages, persistent=True)


def _grouped_bucket(shape: Mapping[str, int]) -> tuple[int, ...]:
    names = ("groups", "n", "k", "bytes", "blocks", "aligned", "weight_gradient")
    return (power_of_2(shape["rows"]), *(shape[name] for name in names))


GROUPED = Tunable("grouped_matmul", MatmulConfig, _grouped_heuristic, _grouped_space, _grouped_valid, _grouped_bucket)
