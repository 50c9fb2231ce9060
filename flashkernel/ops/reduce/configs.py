"""Launch configs of the reductions: tiles, warps, and how many programs share the rows or a long row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from flashkernel.core.device import Device
from flashkernel.core.tune import Tunable, power_of_2

MAX_TILE = 16384  # widest row a softmax keeps in registers: 16 values a thread at 32 warps
MAX_SPLITS = 1024  # programs that share one row; their results must fit the tile of the pass that merges them
MIN_BLOCKS = 4  # a row of fewer tiles is not worth the second launch that a split costs
BYTES_PER_WARP = 2048  # 64 bytes a thread: four 16-byte loads in flight

Shape = Mapping[str, int]


def tile_width(width: int) -> int | None:
    """Columns of a tile that holds a whole row, or None where the row is too long for one."""
    padded = power_of_2(width)
    return padded if padded <= MAX_TILE else None


@dataclass(frozen=True)
class ReduceConfig:
    """A tile that moves along its rows; `programs_per_sm` programs on each SM are enough to fill it."""

    rows: int
    block: int
    num_warps: int
    programs_per_sm: int
    num_stages: int  # tiles under way at once


@dataclass(frozen=True)
class TileConfig:
    """A tile of rows and columns that is visited once."""

    rows: int
    block: int
    num_warps: int


def splits_of(config: ReduceConfig, device: Device, tiles: int, width: int, block: int) -> tuple[int, int]:
    """(columns per program, programs per row): one program, unless the rows are too few to fill the GPU and long."""
    blocks = max(1, -(-width // block))
    wanted = min(MAX_SPLITS, device.sms * config.programs_per_sm // max(1, tiles), blocks)
    if wanted < 2 or blocks < MIN_BLOCKS:
        return blocks * block, 1
    columns_per_program = -(-blocks // wanted) * block
    return columns_per_program, -(-width // columns_per_program)


def programs_of(config: ReduceConfig, device: Device, rows: int, blocks: int) -> int:
    """Programs that share the rows of one block of columns."""
    return max(1, min(-(-rows // config.rows), config.programs_per_sm * device.sms // max(1, blocks)))


def _bucket(shape: Shape) -> tuple[int, ...]:
    return (
        power_of_2(shape["rows"]),
        power_of_2(shape["width"]),
        shape.get("bytes", 4),
        shape.get("aligned", 1),
        shape.get("reads", 1),
        shape.get("powers", 0),
    )


def _too_large(elements: float, most: int) -> str | None:
    return None if elements <= most else f"{elements:.0f} values a thread do not fit its registers"


def _narrow_rows(shape: Shape, width: int, elements: int) -> int:
    """Rows of a tile of `elements` values, or fewer where there are no more."""
    return max(1, min(elements // width, power_of_2(shape["rows"])))


def _reduce_heuristic(device: Device, shape: Shape) -> ReduceConfig:
    size, width, rows = shape["bytes"], power_of_2(shape["width"]), power_of_2(shape["rows"])
    if rows < device.sms and width <= 8192 and shape["aligned"]:
        # A few short rows: what counts is how soon one is done, so 16 values a thread.
        return ReduceConfig(1, width, max(1, min(16, width // 512)), 8, num_stages=1)
    if shape.get("powers") and shape["aligned"] and width >= 1024 and rows >= 8 * device.sms:
        # Exponentials cost more to merge than to add up: two warps a row, until rows are long enough for more.
        return ReduceConfig(1, 1024, 2, 8, 1) if width <= 65536 else ReduceConfig(1, 4096, 4, 8, num_stages=3)
    if width >= 16384 and shape["reads"] == 1 and shape["aligned"] and size == 2 and rows * width >= 1 << 22:
        return ReduceConfig(1, 8192, 16 if shape.get("powers") else 8, 8, num_stages=1)
    per_warp = BYTES_PER_WARP // size if shape["aligned"] else 512  # single values take a register each
    block = min(width, 4 * per_warp)
    # Four warps a tile; up to four times as wide where such tiles are too few to fill the GPU.
    widen = max(1, min(4, power_of_2(8 * device.sms // max(1, rows * (width // block)))))
    block = min(width, widen * block)
    tile_rows = _narrow_rows(shape, block, 2 * per_warp)
    num_warps = max(1, min(16, tile_rows * block // per_warp))
    # Eight tiles, and as many of the weights where there are some, fit the shared memory.
    return ReduceConfig(tile_rows, block, num_warps, max(1, 32 // num_warps), num_stages=4 - shape["reads"])


def _reduce_space(device: Device, shape: Shape) -> Iterator[ReduceConfig]:
    width = power_of_2(shape["width"])
    for block in (1024, 2048, 4096, 8192, 16384, 32768):
        for num_warps in (2, 4, 8, 16, 32):
            for programs_per_sm in (1, 2, 4, 8, 16):
                for num_stages in (1, 2, 3, 4):
                    yield ReduceConfig(max(1, 1024 // width), min(block, width), num_warps, programs_per_sm, num_stages)


def _reduce_valid(config: ReduceConfig, device: Device, shape: Shape) -> str | None:
    return _too_large(config.rows * config.block / (32 * config.num_warps), 64)


def _softmax_heuristic(device: Device, shape: Shape) -> TileConfig:
    """16 values a thread, and no more warps than may meet at a barrier."""
    width, count = power_of_2(shape["width"]), power_of_2(shape["rows"])
    rows = _narrow_rows(shape, width, 1024)
    most = 8
    if count < device.sms * rows:
        most = 32  # too few rows to fill the GPU: what counts is how soon one is done
    elif count < 16 * device.sms:
        most = max(4, width // 2048)
    return TileConfig(rows, width, max(1, min(most, rows * width // 512)))


def _backward_heuristic(device: Device, shape: Shape) -> TileConfig:
    forward = _softmax_heuristic(device, shape)
    return TileConfig(
        forward.rows, forward.block, min(32, 2 * forward.num_warps) if forward.block >= 4096 else forward.num_warps
    )


def _softmax_space(device: Device, shape: Shape) -> Iterator[TileConfig]:
    for rows in (1, 2, 4):
        for num_warps in (1, 2, 4, 8, 16, 32):
            yield TileConfig(rows, power_of_2(shape["width"]), num_warps)


def _softmax_valid(config: TileConfig, device: Device, shape: Shape) -> str | None:
    if config.block < power_of_2(shape["width"]):
        return f"a tile of {config.block} columns does not hold a row"
    return _too_large(config.rows * config.block / (32 * config.num_warps), 64)


def _spread_heuristic(device: Device, shape: Shape) -> TileConfig:
    size = shape["bytes"]
    block = min(power_of_2(shape["width"]), 4096 // size)
    return TileConfig(_narrow_rows(shape, block, 4096 // size), block, 4)


def _spread_space(device: Device, shape: Shape) -> Iterator[TileConfig]:
    for block in (512, 1024, 2048, 4096, 8192):
        for num_warps in (2, 4, 8):
            yield TileConfig(1, block, num_warps)


def _tile_valid(config: TileConfig, device: Device, shape: Shape) -> str | None:
    return _too_large(config.rows * config.block / (32 * config.num_warps), 128)


def _weighted_heuristic(device: Device, shape: Shape) -> ReduceConfig:
    size = shape["bytes"]
    block = min(power_of_2(shape["width"]), 2048 // size)
    rows = _narrow_rows(shape, block, 4 * BYTES_PER_WARP // size)
    return ReduceConfig(rows, block, 4, 5, num_stages=3)


def _weighted_space(device: Device, shape: Shape) -> Iterator[ReduceConfig]:
    width = power_of_2(shape["width"])
    for rows in (1, 2, 4, 8):
        for block in (256, 512, 1024, 2048):
            for num_warps in (2, 4, 8):
                for programs_per_sm in (2, 4, 8):
                    for num_stages in (1, 2, 3, 4):
                        yield ReduceConfig(rows, min(block, width), num_warps, programs_per_sm, num_stages)


def _column_heuristic(device: Device, shape: Shape) -> TileConfig:
    return TileConfig(rows=min(64, power_of_2(shape["rows"])), block=32, num_warps=4)


def _column_space(device: Device, shape: Shape) -> Iterator[TileConfig]:
    for rows in (16, 32, 64, 128):
        for block in (16, 32, 64, 128):
            for num_warps in (2, 4, 8):
                yield TileConfig(rows, block, num_warps)


REDUCE = Tunable("reduce", ReduceConfig, _reduce_heuristic, _reduce_space, _reduce_valid, _bucket)
SPREAD = Tunable("reduce_spread", TileConfig, _spread_heuristic, _spread_space, _tile_valid, _bucket)
SOFTMAX_FORWARD = Tunable("softmax_forward", TileConfig, _softmax_heuristic, _softmax_space, _softmax_valid, _bucket)
SOFTMAX_BACKWARD = Tunable("softmax_backward", TileConfig, _backward_heuristic, _softmax_space, _softmax_valid, _bucket)
WEIGHTED_BACKWARD = Tunable(
    "weighted_backward", ReduceConfig, _weighted_heuristic, _weighted_space, _reduce_valid, _bucket
)
COLUMN_SUM = Tunable("reduce_column_sum", TileConfig, _column_heuristic, _column_space, _tile_valid, _bucket)
