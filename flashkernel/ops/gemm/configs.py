"""Launch configs of the linear layer's kernels, in Triton (`LinearConfig`) and in CUDA C++ (`TileConfig`).

A config says which kernel runs, its tile, and how many programs share the work.

The weight is read once whatever the config; what differs is how many bytes are in flight, how evenly they are spread
over the SMs, and how often x is read again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from flashkernel.core.device import Device
from flashkernel.core.tune import Tunable, ceil_div, power_of_2

MAX_ROWS = 64  # beyond, the weight is no longer what the time goes to
DEQUANTIZED = ("int4", "int8", "mxfp4")  # formats whose elements become x's dtype before the product
TILE_ROWS = 1024  # up to which weights in tiles are faster than a pass that dequantizes them and cuBLAS
VECTOR_ROWS = 4  # rows up to which plain arithmetic keeps pace with the memory
MAX_VECTOR_ROWS = 8
_FEW_VECTOR_ROWS, _NARROW = 2, 1024  # on Hopper, plain arithmetic keeps pace with more rows up to so many outputs
MAX_COUNTERS = 8192  # tiles whose sums may be shared between programs
_VERY_MANY = 65536  # outputs, as of a layer that ends in a vocabulary
_LONG_SHARE = 1280  # elements of a sum that are worth adding to another program's


@dataclass(frozen=True)
class LinearConfig:
    """`kernel` is "vector" (sums in plain arithmetic) or "tensor" (tensor cores).

    A program computes `block_n` outputs, `block_k` elements of the sum at a time. With `programs` (Stream-K) the
    programs take equal parts of all K steps of all tiles, and the last program of a split tile adds the partial sums;
    0 means one program per tile.
    """

    kernel: str
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    programs: int = 0


def row_tile(rows: int) -> int:
    """Rows of x in a tensor-core tile."""
    return max(16, min(MAX_ROWS, power_of_2(rows)))


def tile_count(config: LinearConfig, sizes: tuple[int, ...]) -> int:
    """Tiles of the outputs; no tile crosses from one weight into the next."""
    return sum(ceil_div(size, config.block_n) for size in sizes)


def _bucket(shape: Mapping[str, int]) -> tuple[int, ...]:
    # Columns and inner stay exact: how they divide among the SMs is what the choice depends on.
    rows = shape["rows"] if shape["rows"] <= MAX_VECTOR_ROWS else power_of_2(shape["rows"])
    key = (rows, shape["columns"], shape["inner"], shape["bytes"], shape["streams"], shape["transposed"], shape["norm"])
    return (*key, shape.get("x_bytes", shape["bytes"]), bool(shape.get("dequantized")))


def _heuristic(device: Device, shape: Mapping[str, int]) -> LinearConfig:
    if shape.get("dequantized"):
        return _dequantized(device, shape)
    if shape["rows"] <= _vector_rows(device, shape) and not shape["transposed"]:
        return _vector(device, shape)
    return _tensor(device, shape)


def _vector_rows(device: Device, shape: Mapping[str, int]) -> int:
    """Rows up to which the vector kernel is the default.

    Measured in 16 bits on an H200: it takes longer for 4 rows than the tensor cores for 16, except where there are few
    outputs.
    """
    measured = device.arch == 90 and shape["bytes"] == 2
    return _FEW_VECTOR_ROWS if measured and shape["columns"] > _NARROW else VECTOR_ROWS


def _dequantized(device: Device, shape: Mapping[str, int]) -> LinearConfig:
    """Weights of 4 and 8 bits: a step's bytes are few, so steps are long; wide tiles have no registers for them."""
    many = shape["rows"] > MAX_ROWS
    columns, inner = (64, 64) if shape["streams"] == 2 or many or row_tile(shape["rows"]) == 64 else (32, 128)
    programs = 0 if many else _programs(device, shape, columns, inner)
    config = LinearConfig("tensor", columns, inner, 4, 4 if device.arch >= 80 else 1, programs)
    while _valid(config, device, shape) and config.num_stages > 1:
        config = replace(config, num_stages=config.num_stages - 1)
    return config


def _vector(device: Device, shape: Mapping[str, int]) -> LinearConfig:
    vector = 16 // shape["bytes"]  # elements of one 16-byte load
    num_warps, few = 4, shape["rows"] <= 2  # every row of x costs registers
    inner = 32 * num_warps * vector * (2 if few else 1)
    # Threads past the sum's end idle, which costs less than another step; 32 along it are the least that load well.
    while inner > 32 * vector and ceil_div(shape["inner"], inner) * inner > 1.35 * shape["inner"]:
        inner //= 2
    if (
        inner > 32 * num_warps * vector
    ):  # two outputs a program keep enough in flight; more only where there are very many
        return LinearConfig("vector", 4 if shape["columns"] >= _VERY_MANY else 2, inner, num_warps, num_stages=1)
    loads = 8 if few else 4  # 16-byte loads in flight per thread
    columns = max(1, loads * 32 * num_warps * vector // (inner * shape["streams"]))
    apart = 32 * num_warps * vector // inner  # columns that different warps work on
    while columns > max(2, apart) and ceil_div(shape["columns"], columns) < 3 * device.sms:
        columns //= 2
        if inner < shape["inner"] and few:
            inner *= 2  # as many bytes in flight, in fewer steps
    return LinearConfig("vector", columns, inner, num_warps, num_stages=1)


def _tensor(device: Device, shape: Mapping[str, int]) -> LinearConfig:
    rows = row_tile(shape["rows"])
    if shape["bytes"] == 4:
        columns, inner, num_stages = 64, 32, 3
    elif rows == 64 and shape["bytes"] == 1:  # 8-bit weights are converted in registers, which wider tiles have not
        columns, inner, num_stages = 64, 64, 4
    elif rows == 64:  # x is read again for every tile: wide tiles
        columns, inner, num_stages = 128 // shape["streams"], 64, 4
    elif shape["columns"] >= _VERY_MANY:
        columns, inner, num_stages = 128 // shape["streams"], 64, 5
    elif shape["streams"] == 2:
        columns, inner, num_stages = 64, 64, 5
    elif shape["norm"] and rows == 16:  # few steps, since each also normalizes x
        columns, inner, num_stages = 32, 256, 4
    elif shape["norm"]:
        columns, inner, num_stages = 64, 64, 6
    else:
        small = shape["columns"] <= 32 * device.sms and shape["inner"] <= 1024  # more programs, none of which is long
        columns, inner, num_stages = 32 if small else 64, 128, 4
    num_stages = num_stages if device.arch >= 80 else 1
    alone = shape["norm"] and inner == 256  # narrow tiles: enough programs without sharing sums
    programs = 0 if alone else _programs(device, shape, columns, inner)
    config = LinearConfig("tensor", columns, inner, 4, num_stages, programs)
    while _valid(config, device, shape) and config.num_stages > 1:
        config = replace(config, num_stages=config.num_stages - 1)
    return config


def _programs(device: Device, shape: Mapping[str, int], columns: int, inner: int) -> int:
    """Equal shares of the work, where tiles alone would leave SMs idle; 0: tiles alone fill them."""
    tiles, steps = ceil_div(shape["columns"], columns), ceil_div(shape["inner"], inner)
    if tiles * steps == 0 or tiles >= 0.9 * device.sms:
        return 0
    # Two programs per SM hide one another's ends; a short share costs more in adding up than it gains.
    share = ceil_div(tiles * steps, 2 * device.sms)
    if share * inner < (_LONG_SHARE // 4 if shape["norm"] else _LONG_SHARE):
        share = max(4, ceil_div(tiles * steps, device.sms))
    return ceil_div(tiles * steps, share) if 2 * share <= steps else 0


def _space(device: Device, shape: Mapping[str, int]) -> Iterator[LinearConfig]:
    for columns in (1, 2, 4, 8, 16):
        for inner in (256, 512, 1024, 2048):
            for num_warps in (1, 2, 4, 8):
                for num_stages in (1, 3):
                    yield LinearConfig("vector", columns, inner, num_warps, num_stages)
    for columns in (16, 32, 64, 128):  # of 16 each, even few outputs fill the GPU without sharing sums
        for inner in (64, 128, 256):
            for num_stages in (3, 4, 5, 6):
                for programs in (0, device.sms, 2 * device.sms, 3 * device.sms):
                    yield LinearConfig("tensor", columns, inner, 4, num_stages, programs)


def _valid(config: LinearConfig, device: Device, shape: Mapping[str, int]) -> str | None:
    loaded = config.block_n * config.block_k * shape["streams"]
    if config.kernel == "vector":
        if shape["rows"] > MAX_VECTOR_ROWS:
            return f"{shape['rows']} rows are too many for plain arithmetic; it takes up to {MAX_VECTOR_ROWS}"
        if config.programs:
            return "the vector kernel has one program for each tile"
        if shape.get("dequantized"):
            return "the vector kernel multiplies by weights as they are"
        if shape["transposed"]:
            return "the vector kernel wants weights that are contiguous along the sum"
        each = loaded / (32 * config.num_warps)
        return None if each <= 128 else f"{each:.0f} weights a thread do not fit its registers"
    if config.kernel != "tensor":
        return f"there is no kernel {config.kernel!r}; there are 'vector' and 'tensor'"
    if config.block_k < 16:
        return "tensor cores sum at least 16 elements at a time"
    x_bytes = shape.get("x_bytes", shape["bytes"])  # quantized weights have narrower elements than x
    staged = (loaded * shape["bytes"] + row_tile(shape["rows"]) * config.block_k * x_bytes) * config.num_stages
    if device.shared_per_block and staged > device.shared_per_block:
        return f"{config} needs {staged} bytes of shared memory; a block has {device.shared_per_block}"
    if config.programs and shape["rows"] > MAX_ROWS:
        return f"programs share the sums of one tile of rows; {shape['rows']} rows have more than {MAX_ROWS}"
    if config.programs and ceil_div(shape["columns"], config.block_n) > MAX_COUNTERS - 2:
        return f"no more than {MAX_COUNTERS} tiles can be shared between programs"
    return None


LINEAR = Tunable("linear", LinearConfig, _heuristic, _space, _valid, _bucket)


@dataclass(frozen=True)
class TileConfig:
    """A tile of the CUDA C++ kernel: `block_m` rows by `block_n` columns of products, `block_k` of the sum at a time.

    `warps_m` by `warps_n` warps share a tile. `stages` buffers are filled ahead of the tensor cores: 2 on Turing, which
    has no asynchronous copies. `splits` blocks share the sum of each tile.
    """

    block_m: int
    block_n: int
    block_k: int
    warps_m: int
    warps_n: int
    stages: int
    splits: int = 1

    @property
    def tile(self) -> tuple[int, ...]:
        """The kernel's template arguments."""
        return (self.block_m, self.block_n, self.block_k, self.warps_m, self.warps_n, self.stages)

    @property
    def shared_bytes(self) -> int:
        return 2 * self.stages * self.block_k * (self.block_m + self.block_n)


MAX_SPLITS = 16
_SPLIT_STEPS = 4  # K steps that are worth a block of their own

CUDA_TILES = {  # by the rows they are for, with the stages from sm_80 on
    16: TileConfig(16, 64, 64, 1, 4, 4),
    32: TileConfig(32, 64, 64, 1, 4, 4),
    64: TileConfig(64, 64, 64, 2, 2, 3),
    128: TileConfig(128, 128, 32, 2, 4, 4),
}


def cuda_tile_config(rows: int, arch: int) -> TileConfig:
    """The tile for so many rows, without splits."""
    config = next((config for most, config in CUDA_TILES.items() if rows <= most), CUDA_TILES[128])
    return config if arch >= 80 else replace(config, stages=2)


def _cuda_tiles(config: TileConfig, shape: Mapping[str, int]) -> int:
    width = config.block_n // shape["streams"]
    return ceil_div(shape["rows"], config.block_m) * ceil_div(shape["columns"], width)


def _cuda_heuristic(device: Device, shape: Mapping[str, int]) -> TileConfig:
    config = cuda_tile_config(shape["rows"], device.arch)
    if config.block_m == 128 and _cuda_tiles(config, shape) < device.sms:
        config = cuda_tile_config(64, device.arch)  # smaller tiles keep more SMs busy
    tiles, steps = _cuda_tiles(config, shape), ceil_div(shape["inner"], config.block_k)
    if tiles == 0 or tiles >= device.sms:
        return config
    splits = min(MAX_SPLITS, steps // _SPLIT_STEPS, ceil_div(2 * device.sms, tiles))
    return replace(config, splits=max(1, splits))


def _cuda_space(device: Device, shape: Mapping[str, int]) -> Iterator[TileConfig]:
    for rows in CUDA_TILES:
        for splits in (1, 2, 3, 4, 6, 8, 12, MAX_SPLITS):
            yield replace(cuda_tile_config(rows, device.arch), splits=splits)


def _cuda_valid(config: TileConfig, device: Device, shape: Mapping[str, int]) -> str | None:
    tiles = [known.tile[:5] for known in CUDA_TILES.values()]
    if config.tile[:5] not in tiles:
        return f"{config} is no tile of the kernel; there are {', '.join(map(str, tiles))}"
    if not 1 <= config.splits <= MAX_SPLITS:
        return f"{config.splits} splits; there are 1 to {MAX_SPLITS}"
    if device.arch < 80 and config.stages != 2:
        return f"{config.stages} stages need asynchronous copies, which sm_80 has"
    if device.shared_per_block and config.shared_bytes > device.shared_per_block:
        return f"{config} needs {config.shared_bytes} bytes of shared memory; a block has {device.shared_per_block}"
    return None


def _cuda_bucket(shape: Mapping[str, int]) -> tuple[int, ...]:
    rows = min(power_of_2(shape["rows"]), 1 << 14)
    return (rows, shape["columns"], shape["inner"], shape["streams"])


CUDA_LINEAR = Tunable("linear_cuda", TileConfig, _cuda_heuristic, _cuda_space, _cuda_valid, _cuda_bucket)
