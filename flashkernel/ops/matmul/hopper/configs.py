"""Launch configs of the Hopper matrix product: tiles, consumers, stages, and in how many parts K is split.

The heuristic is a cost rule. It estimates the clock cycles of every candidate and takes the cheapest: full waves of
work tiles, each of which is bound by the tensor cores or by what it reads through L2, and with split-K one more pass
over the partial sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from flashkernel.core.device import Device
from flashkernel.core.tune import Tunable, ceil_div, power_of_2

PRODUCER_REGISTERS = 24  # per thread of the producer warp
MAX_STAGES = 8  # as many named barriers are free (core/gluon.py)
CONSUMER_REGISTERS = {1: 240, 2: 240, 3: 160}
STORE_STAGES = 2  # chunks of C in shared memory, per consumer, while TMA stores them
_CHUNK_BYTES = 8192  # of a chunk: larger ones take more registers than the epilogue has
GROUP_M = 8
_BARRIER_BYTES = 1024  # mbarriers, and alignment of the buffers
_MAX_SPLITS = 16
TILE_WIDTHS = (96, 160, 192, 224)  # columns of tiles in CUDA C++ (tile_width.cu)
# Fitted to the times of 24 products of Llama-3's and gpt-oss's projections in all configs (README.md).
_MMA_RATE = 3680  # bytes of K, times rows and columns of C: per clock cycle and SM
_L2_RATE = 78  # bytes per clock cycle and SM
_SECOND_TILE = 1.11  # the rate's loss to a second tile of B, whose products read A again
_TILE_CYCLES = 5300  # of an epilogue's and a pipeline's start, whatever their size
_STORE_RATE = 36  # elements of C per clock cycle
_STREAM_CYCLES = 28000  # of clearing Stream-K's flags and waiting for other programs
_LOAD_SHARE = 0.05  # of the loads' time that the products do not hide
_STREAM_GAIN = 0.95  # of the other configs' time: how much less Stream-K must take
# The rate's loss with consumers that alternate, with large accumulators or in many waves: (of 128 rows, of 64).
_PINGPONG_LOSS, _PINGPONG_WAVES = (1.15, 1.18), 6
_PINGPONG_ROWS = 1024  # up to which tiles that alternate are considered, whatever K
_PINGPONG_BLOCKS = 32  # of K, up to which they are considered, whatever M: the epilogue is a large part of a tile
_REDUCE_CYCLES = 1800  # of another launch
_REDUCE_RATE = 23  # bytes per clock cycle and SM


@dataclass(frozen=True)
class HopperTile:
    """The work tile and the pipeline of a matrix product on Hopper.

    Attributes:
        rows: rows of C that a consumer warpgroup computes, 64 or 128.
        block_n: columns of a work tile.
        num_consumers: consumer warpgroups.
        num_stages: K blocks in flight; each is 128 bytes of K.
    """

    rows: int
    block_n: int
    num_consumers: int
    num_stages: int

    @property
    def block_m(self) -> int:
        """Rows of a work tile."""
        return self.rows * self.num_consumers


@dataclass(frozen=True)
class HopperMatmul(HopperTile):
    """Launch config of the Hopper matrix product.

    Attributes:
        pingpong: consumer warpgroups alternate work tiles (CUTLASS ping-pong); else they share one (cooperative).
        group_m: tiles of rows that are worked on at the same time (L2 swizzle).
        num_splits: parts of K, which are summed by a second kernel.
        stream_k: the tiles that do not divide evenly among the programs are shared out along K.
        tile_width: the kernel in CUDA C++, whose tiles have 128 rows and one of TILE_WIDTHS columns.
    """

    pingpong: bool = False
    group_m: int = GROUP_M
    num_splits: int = 1
    stream_k: bool = False
    tile_width: bool = False

    @property
    def block_m(self) -> int:
        """Rows of a work tile."""
        return self.rows if self.pingpong else super().block_m


def second_columns(block_n: int) -> int:
    """Returns the columns of a work tile's second tile of B; 0 if it has one tile."""
    return 64 if block_n == 192 else 0


def chunk_columns(rows: int, out_bytes: int) -> int:
    """Returns the columns of a staged chunk of C: 128 bytes of 64 rows, or 64 bytes of 128 rows (one swizzle)."""
    return _CHUNK_BYTES // (rows * out_bytes)


def store_stages(chunks: int) -> int:
    """Returns how many chunks of C a consumer stages; it divides the chunks of a work tile."""
    return min(chunks, 3 if chunks % STORE_STAGES else STORE_STAGES)


def _stage_bytes(config: HopperMatmul) -> int:
    return (config.block_m + config.block_n) * 128


def _shared_bytes(config: HopperMatmul) -> int:
    staged = config.num_consumers * (3 if config.block_n == 192 else STORE_STAGES) * _CHUNK_BYTES
    return config.num_stages * _stage_bytes(config) + staged + _BARRIER_BYTES


def tile_width_shared_bytes(config: HopperMatmul) -> int:
    """Returns the shared memory of a block of tile_width.cu: the stages, and two mbarriers for each."""
    return config.num_stages * (_stage_bytes(config) + 16)


def _blocks(shape: Mapping[str, int]) -> int:
    return ceil_div(shape["k"] * shape["bytes"], 128)


def _tiles(config: HopperMatmul, shape: Mapping[str, int]) -> int:
    return shape["batch"] * ceil_div(shape["m"], config.block_m) * ceil_div(shape["n"], config.block_n)


def num_streamed(tiles: int, num_programs: int, blocks: int) -> int:
    """Returns how many tiles, of `blocks` K blocks each, are shared out along K: those that do not divide evenly among
    the programs, or none where a program would get no block. Whoever finishes a tile waits for all programs from the
    tile's first one on, and one without a share would never signal."""
    rest = tiles % num_programs
    return rest if rest * blocks >= num_programs else 0


def _valid_tile_width(config: HopperMatmul, device: Device, shape: Mapping[str, int]) -> str | None:
    if not shape.get("tile_width"):
        return f"{config}: tile_width.cu multiplies 16-bit operands with rows along K, without gates or scales"
    if config.block_n not in TILE_WIDTHS or config.rows != 64 or config.num_consumers != 2 or config.num_stages < 2:
        return f"{config}: tile_width.cu has tiles of 2 x 64 rows and {TILE_WIDTHS} columns, and at least 2 stages"
    if config.pingpong or config.stream_k or config.num_splits > 1 or config.group_m != GROUP_M:
        return f"{config}: tile_width.cu has consumers that share a tile, never splits K and groups rows by 16"
    if tile_width_shared_bytes(config) > device.shared_per_block:
        return f"{config} needs {tile_width_shared_bytes(config)} bytes; a block has {device.shared_per_block}"
    return None


def _valid(config: HopperMatmul, device: Device, shape: Mapping[str, int]) -> str | None:
    if config.tile_width:
        return _valid_tile_width(config, device, shape)
    needed = _shared_bytes(config)
    if needed > device.shared_per_block:
        return f"{config} needs {needed} bytes of shared memory; a block has {device.shared_per_block}"
    if config.rows not in (64, 128) or config.block_n not in (64, 128, 192, 256):
        return f"{config}: a consumer has 64 or 128 rows and 64, 128, 192 or 256 columns"
    if config.num_consumers not in CONSUMER_REGISTERS or (config.pingpong and config.num_consumers < 2):
        return f"{config}: a tile has one to three consumers, with pingpong two or three"
    # The accumulator, and what an instruction needs beside it, must fit into what a thread has before the warps divide
    # the registers among them.
    entry_registers = 65536 // (128 * (config.num_consumers + 1))
    if config.rows * config.block_n // 128 + 32 > entry_registers:
        return f"{config}: an accumulator of {config.rows} x {config.block_n} does not fit into the registers"
    if shape["block_scaled"] and (config.pingpong or config.block_n > 128 or config.rows > 64):
        return f"{config}: with block scales the consumers share a tile, each 64 rows and 64 or 128 columns of it"
    if shape["block_scaled"] and 3 * config.rows * config.block_n // 128 > CONSUMER_REGISTERS[config.num_consumers]:
        return f"{config}: the sum and two products of {config.rows} x {config.block_n} do not fit into the registers"
    if shape.get("gated") and (config.block_n not in (128, 256) or shape["block_scaled"]):
        return f"{config}: gate and up take 64 or 128 columns each, and no block scales"
    if shape.get("quantized") and (
        config.rows != 64 or config.block_n // (1 + shape.get("gated", 0)) not in (128, 256)
    ):
        return f"{config}: an output with scales of 1 x 128 takes tiles of 64 rows and 128 or 256 columns"
    if shape["integer"] and config.block_n > 128:
        return f"{config}: WGMMA of int8 operands has up to 128 columns in Triton"
    if not 2 <= config.num_stages <= MAX_STAGES:
        return f"{config} must have 2 to {MAX_STAGES} stages"
    if config.stream_k and (config.pingpong or config.num_splits > 1 or shape["integer"]):
        return f"{config}: Stream-K has consumers that share a tile and partial sums in float32, and no split-K"
    if not 1 <= config.num_splits <= max(1, _blocks(shape)):
        return f"K has {_blocks(shape)} blocks and cannot be split in {config.num_splits}"
    return None


def _with_most_stages(config: HopperMatmul, device: Device) -> HopperMatmul:
    left = device.shared_per_block - _shared_bytes(replace(config, num_stages=0))
    return replace(config, num_stages=max(2, min(MAX_STAGES, left // _stage_bytes(config))))


def _cycles(config: HopperMatmul, device: Device, shape: Mapping[str, int]) -> float:
    """Returns about how many clock cycles a call takes."""
    steps = ceil_div(_blocks(shape), config.num_splits)
    products = config.block_m * config.block_n * 128 / _MMA_RATE
    if second_columns(config.block_n):
        products *= _SECOND_TILE
    loads = _stage_bytes(config) / _L2_RATE
    step = max(products, loads) + _LOAD_SHARE * loads
    epilogue = _TILE_CYCLES + config.block_m * config.block_n / _STORE_RATE
    tiles = _tiles(config, shape) * config.num_splits
    streamed = num_streamed(tiles, device.sms, steps) if config.stream_k else 0
    if streamed:
        blocks = streamed * steps / device.sms  # of the streamed tiles, for each program
        partials = 2 * config.block_m * config.block_n * 4 / _L2_RATE  # written by one program and read by another
        time = tiles // device.sms * (steps * step + epilogue)
        return time + blocks * step + epilogue + partials + _STREAM_CYCLES
    if config.pingpong:  # the epilogue of one consumer runs beside the products of the others
        waves = ceil_div(tiles, device.sms)
        large = config.rows * config.block_n == 16384
        loss = _PINGPONG_LOSS[config.rows == 64] if large or waves >= _PINGPONG_WAVES else 1.0
        time = waves * max(loss * steps * step, epilogue / config.num_consumers) + epilogue
    else:
        time = ceil_div(tiles, device.sms) * (steps * step + epilogue)
    if config.num_splits > 1:
        moved = shape["batch"] * shape["m"] * shape["n"] * (8 * config.num_splits + 2)  # written and read once
        time += _REDUCE_CYCLES + moved / (device.sms * _REDUCE_RATE)
    return time


def _tile_shapes() -> Iterator[HopperMatmul]:
    yield HopperMatmul(64, 256, 2, 0)
    yield HopperMatmul(64, 192, 2, 0)
    yield HopperMatmul(128, 128, 2, 0)
    yield HopperMatmul(64, 128, 2, 0)
    yield HopperMatmul(128, 128, 2, 0, pingpong=True)
    yield HopperMatmul(64, 256, 2, 0, pingpong=True)
    yield HopperMatmul(64, 192, 2, 0, pingpong=True)
    yield HopperMatmul(64, 128, 2, 0, pingpong=True)
    yield HopperMatmul(64, 64, 2, 0, pingpong=True)


def _splits(config: HopperMatmul, device: Device, shape: Mapping[str, int]) -> list[int]:
    """Returns the numbers of splits worth a look: 1, and what fills one or two waves of SMs."""
    tiles, blocks = _tiles(config, shape), _blocks(shape)
    most = min(_MAX_SPLITS, blocks // 4)
    return sorted({1} | {splits for waves in (1, 2) if 1 < (splits := waves * device.sms // max(1, tiles)) <= most})


def _heuristic(device: Device, shape: Mapping[str, int]) -> HopperMatmul:
    # Small tiles that alternate are for few rows or a short K; else large tiles read less.
    short = shape["bytes"] == 2 and _blocks(shape) <= _PINGPONG_BLOCKS
    many = shape["batch"] * shape["m"] > _PINGPONG_ROWS and not short
    candidates = [
        replace(_with_most_stages(config, device), num_splits=splits)
        for config in _tile_shapes()
        if not (many and config.pingpong)
        for splits in _splits(config, device, shape)
    ]
    streamed = [replace(config, stream_k=True) for config in candidates if config.num_splits == 1]

    def cheapest(configs: list[HopperMatmul]) -> tuple[float, HopperMatmul] | None:
        found = [config for config in configs if _valid(config, device, shape) is None]
        return min([(_cycles(config, device, shape), config) for config in found], key=lambda one: one[0], default=None)

    plain, stream_k = cheapest(candidates), cheapest(streamed)
    assert plain is not None
    return stream_k[1] if stream_k is not None and stream_k[0] < _STREAM_GAIN * plain[0] else plain[1]


def _space(device: Device, shape: Mapping[str, int]) -> Iterator[HopperMatmul]:
    for config in _tile_shapes():
        most = _with_most_stages(config, device).num_stages
        for num_stages in {most, most - 1}:
            for group_m in (4, 8, 16):
                for splits in _splits(config, device, shape):
                    yield replace(config, num_stages=num_stages, group_m=group_m, num_splits=splits)
                if not config.pingpong:
                    yield replace(config, num_stages=num_stages, group_m=group_m, stream_k=True)

    if shape.get("tile_width"):
        for width in TILE_WIDTHS:
            one = HopperMatmul(64, width, 2, 1, tile_width=True)
            yield replace(one, num_stages=device.shared_per_block // tile_width_shared_bytes(one))


def _bucket(shape: Mapping[str, int]) -> tuple[int, ...]:
    # N and K stay exact: how they divide among the SMs is what the choice depends on.
    rows = shape["m"] if shape["m"] % 64 == 0 and shape["m"] <= 1024 else power_of_2(shape["m"])
    kinds = (shape.get(name, 0) for name in ("block_scaled", "integer", "gated", "quantized", "tile_width"))
    return (shape["batch"], rows, shape["n"], shape["k"], shape["bytes"], *kinds)


HOPPER_MATMUL = Tunable("matmul_hopper", HopperMatmul, _heuristic, _space, _valid, _bucket)
