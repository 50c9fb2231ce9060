"""Launch configs of the decoding kernels: tile sizes, stages in flight, and whether the keys are split."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from flashkernel.core.device import Device
from flashkernel.core.tune import Tunable, head_block, power_of_2

LONG_PIPELINE = 32  # K blocks per SM from which two programs with half the stages each beat one
TILE_BYTES = 16384  # of K, and as much of V: what keeps an SM's share of the bandwidth in flight
HOPPER_EXTRA = 2048  # bytes of shared memory beside the Hopper kernel's K and V stages: barriers, and the driver's own
HOPPER_TWO_PROGRAMS = 128  # head_dim up to which the registers of an SM hold two Hopper programs
HOPPER_LEFT = 16384  # bytes of shared memory that are left free for the combine kernel, which waits beside it
SHORT = 512  # keys up to which a work tile is not split: one launch beats a finer split and a combine step


@dataclass(frozen=True)
class SplitKVConfig:
    """A tile is `block_m` query rows by `block_n` keys of `tile_kv_heads` KV heads; `num_stages` tiles are in flight.

    With `split_kv`, `programs_per_sm` programs per SM share all K blocks equally; else a program takes a work tile.
    With `overlap_combine` the combine kernel becomes resident while this one still runs (sm_90).
    """

    block_n: int
    tile_kv_heads: int
    block_m: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    split_kv: bool
    overlap_combine: bool


@dataclass(frozen=True)
class HopperConfig:
    """`programs_per_sm` programs per SM, each with `num_stages` stages of `block_n` keys and as many values."""

    block_n: int
    num_stages: int
    programs_per_sm: int


@dataclass(frozen=True)
class CombineConfig:
    """`block_m` rows of one work tile a program, `block_splits` partials of them at a time."""

    block_m: int
    block_splits: int
    num_warps: int


@dataclass(frozen=True)
class PrefillConfig:
    """A tile of `block_m` (query, head) rows by `block_n` keys."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def _width(shape: Mapping[str, int]) -> int:
    return max(16, power_of_2(max(shape["head_dim"], shape["value_dim"])))


def _split_kv_bucket(shape: Mapping[str, int]) -> tuple[int, ...]:
    """Batch and visible keys by powers of two; the rest exactly, since tiles depend on it."""
    sizes = (
        power_of_2(shape["batch"]),
        power_of_2(shape["visible_keys"]),
        _width(shape),
        shape["visible_keys"] > SHORT,
    )
    return (
        *sizes,
        *(shape[name] for name in ("cache_bytes", "q_bytes", "queries", "group_size", "kv_heads", "page_size")),
    )


def _split_kv_heuristic(device: Device, shape: Mapping[str, int]) -> SplitKVConfig:
    width = _width(shape)
    rows = shape["queries"] * shape["group_size"]
    columns = max(16, min(128, TILE_BYTES // (width * shape["q_bytes"])))
    # Two narrow KV heads in a tile: 256 adjacent bytes of a token, and rows that would be padding.
    two = width * shape["cache_bytes"] < 256 and shape["kv_heads"] % 2 == 0 and 2 * rows <= 16
    heads = 2 if two else 1
    block_m = max(16, min(64 if width <= 256 else 16, power_of_2(heads * rows)))
    block_n = max(16 // heads, min(columns // heads, power_of_2(shape["visible_keys"])))
    work_tiles = shape["batch"] * shape["kv_heads"]
    many = device.arch >= 90 and 2 * work_tiles >= device.sms and block_m == 16 and shape["cache_bytes"] == 2
    split = shape["visible_keys"] > (2 * SHORT if many else SHORT)
    per_sm = 2 if device.kind == "cuda" else 5  # a CPU, under the interpreter, is one SM
    config = SplitKVConfig(block_n, heads, block_m, 4, 3, per_sm, split, device.arch >= 90)
    if many and width == 128 and split and shape["page_size"] == 0:  # long ranges: fewer, larger blocks
        config = replace(config, block_n=2 * block_n, num_warps=8, programs_per_sm=1)
    elif many and width == 64 and work_tiles <= 2 * device.sms:  # one head, whole where lengths are alike
        config = replace(config, block_n=128, tile_kv_heads=1, programs_per_sm=1)
    elif many and width == 64 and not split:  # small, so that several fit an SM
        config = replace(config, block_n=64, tile_kv_heads=1, num_stages=4)
    while _split_kv_valid(config, device, shape) and config.num_stages > 1:
        config = replace(config, num_stages=config.num_stages - 1)
    if _split_kv_valid(config, device, shape):
        config = replace(config, programs_per_sm=1)
    while _split_kv_valid(config, device, shape) and config.block_m > 16:
        config = replace(config, block_m=config.block_m // 2)
    return config


def _split_kv_space(device: Device, shape: Mapping[str, int]) -> Iterator[SplitKVConfig]:
    base = _split_kv_heuristic(device, shape)
    overlaps = {False, base.overlap_combine}
    for heads in (1, 2, 4):
        block_m = min(64, max(16, power_of_2(heads * shape["queries"] * shape["group_size"])))
        for block_n, num_warps, num_stages, per_sm, overlap in product(
            (16, 32, 64, 128, 256), (2, 4, 8), (2, 3, 4, 5), (1, 2, 3, 4), overlaps
        ):
            yield SplitKVConfig(block_n, heads, block_m, num_warps, num_stages, per_sm, base.split_kv, overlap)


def _split_kv_valid(config: SplitKVConfig, device: Device, shape: Mapping[str, int]) -> str | None:
    if shape["kv_heads"] % config.tile_kv_heads:
        return f"{shape['kv_heads']} key/value heads cannot be taken {config.tile_kv_heads} at a time"
    if config.overlap_combine and device.arch < 90:
        return "a kernel can be launched before its predecessor's end from sm_90 on"
    if config.block_n * config.tile_kv_heads < 16:
        return "a tile must have 16 columns at least, as tensor cores do"
    tile = 2 * config.block_n * config.tile_kv_heads * _width(shape) * shape["cache_bytes"]
    needed = max(1, config.num_stages - 1) * tile + config.block_m * _width(shape) * shape["q_bytes"]
    programs = config.programs_per_sm if config.split_kv else 1
    if device.shared_per_sm and programs * (needed + 4096) > device.shared_per_sm:
        return f"{programs} programs of {needed} bytes do not fit an SM's shared memory"
    needed += _extra(config.block_m, config.block_n * config.tile_kv_heads, shape)
    if device.shared_per_block and needed > device.shared_per_block - 2048:
        return f"{config} needs {needed} bytes of shared memory; a block has {device.shared_per_block}"
    return None


def _extra(rows: int, columns: int, shape: Mapping[str, int]) -> int:
    """Bytes of shared memory beside the stages: a tile of K or V that is widened from a quantized cache before the MMA,
    and P, which goes through shared memory in float32."""
    widened = columns * _width(shape) * shape["q_bytes"] if shape["cache_bytes"] < shape["q_bytes"] else 0
    return widened + (4 * rows * columns if shape["q_bytes"] == 4 else 0)


def _hopper_bytes(config: HopperConfig, shape: Mapping[str, int]) -> int:
    return 4 * config.num_stages * config.block_n * head_block(shape["head_dim"]) + HOPPER_EXTRA


def _hopper_heuristic(device: Device, shape: Mapping[str, int]) -> HopperConfig:
    width = head_block(shape["head_dim"])
    block_n = max(32, min(128, TILE_BYTES // (2 * width)))
    stage_bytes, available = 4 * block_n * width, device.shared_per_sm - HOPPER_LEFT
    blocks = shape["batch"] * shape["kv_heads"] * shape["visible_keys"] // block_n
    if blocks < LONG_PIPELINE * device.sms or width > HOPPER_TWO_PROGRAMS:
        return HopperConfig(block_n, max(2, available // stage_bytes), 1)
    if shape["page_size"] == 0 and width == 128:
        return HopperConfig(2 * block_n, max(2, available // (2 * stage_bytes)), 1)
    return HopperConfig(block_n, max(2, available // 2 // stage_bytes), 2)  # one multiplies while the other waits


def _hopper_space(device: Device, shape: Mapping[str, int]) -> Iterator[HopperConfig]:
    for block_n, per_sm in product((32, 64, 128), (1, 2)):
        most = (device.shared_per_sm // per_sm - HOPPER_EXTRA) // (4 * block_n * head_block(shape["head_dim"]))
        for num_stages in (most - 1, most):
            yield HopperConfig(block_n, num_stages, per_sm)


def _hopper_valid(config: HopperConfig, device: Device, shape: Mapping[str, int]) -> str | None:
    if config.num_stages < 2:
        return f"{config} has nothing in flight while a tile is multiplied; it takes two stages"
    most = 32 if head_block(shape["head_dim"]) == 256 else 128  # that the registers hold
    if config.block_n not in (32, 64, 128) or config.block_n > most:
        return f"a tile cannot have {config.block_n} keys; it has 32, 64 or 128, and at most {most} of such heads"
    if config.programs_per_sm > 1 and head_block(shape["head_dim"]) > HOPPER_TWO_PROGRAMS:
        return f"heads of {shape['head_dim']} need all registers of an SM for one program"
    needed = _hopper_bytes(config, shape)
    if needed > device.shared_per_block or config.programs_per_sm * needed > device.shared_per_sm:
        return f"{config.programs_per_sm} programs of {needed} bytes do not fit an SM's shared memory"
    return None


def _hopper_bucket(shape: Mapping[str, int]) -> tuple[int, ...]:
    sizes = (power_of_2(shape["batch"]), power_of_2(shape["visible_keys"]), head_block(shape["head_dim"]))
    return (*sizes, shape["rows"], shape["kv_heads"], shape["page_size"])


def _combine_heuristic(device: Device, shape: Mapping[str, int]) -> CombineConfig:
    """Few work tiles: a row a program, so that many read the partials; many work tiles: all their rows at once."""
    width = max(16, power_of_2(shape["value_dim"]))
    rows = power_of_2(shape["rows"]) if shape["work_tiles"] * shape["rows"] > 8 * device.sms else 1
    rows = max(1, min(rows, 1024 // width))
    typical = power_of_2(2 * shape["programs"] // max(1, shape["work_tiles"]))
    return CombineConfig(rows, max(2, min(typical, 64, 8192 // (rows * width))), 4)


def _combine_space(device: Device, shape: Mapping[str, int]) -> Iterator[CombineConfig]:
    for block_m, block_splits, num_warps in product((1, 2, 4, 8, 16), (2, 4, 8, 16, 32, 64), (1, 2, 4, 8)):
        yield CombineConfig(block_m, block_splits, num_warps)


def _combine_valid(config: CombineConfig, device: Device, shape: Mapping[str, int]) -> str | None:
    each = config.block_m * config.block_splits * max(16, power_of_2(shape["value_dim"])) / (32 * config.num_warps)
    return None if each <= 128 else f"{each:.0f} values a thread do not fit its registers"


def _combine_bucket(shape: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(power_of_2(shape[name]) for name in ("work_tiles", "rows", "programs", "value_dim"))


# (block_m, block_n, num_warps, num_stages) by head_dim: the largest tiles that do not spill.
_HOPPER = {64: (128, 64, 4, 3), 128: (128, 128, 8, 2), 256: (128, 32, 8, 2), 512: (64, 16, 8, 1)}
_AMPERE = {64: (128, 64, 8, 2), 128: (64, 32, 4, 2), 256: (64, 32, 8, 1), 512: (32, 16, 8, 1)}


def _prefill_heuristic(device: Device, shape: Mapping[str, int]) -> PrefillConfig:
    table = _HOPPER if device.arch >= 90 or device.kind == "cpu" else _AMPERE
    config = PrefillConfig(*table[max(64, _width(shape))])
    block_m = max(16, min(config.block_m, power_of_2(shape["tokens"] * shape["group_size"])))
    block_n = max(16, min(config.block_n, power_of_2(shape["visible_keys"])))
    config = replace(config, block_m=max(block_m, power_of_2(shape["group_size"])), block_n=block_n)
    while reason := _prefill_valid(config, device, shape):
        if config.num_stages > 1:
            config = replace(config, num_stages=config.num_stages - 1)
        elif config.block_m > max(16, power_of_2(shape["group_size"])):
            config = replace(config, block_m=config.block_m // 2)
        elif config.block_n > 16:
            config = replace(config, block_n=config.block_n // 2)
        else:
            raise ValueError(reason)
    return config


def too_large(device: Device, shape: Mapping[str, int]) -> str | None:
    """Why not even the smallest tiles of prefill fit in a block's shared memory; None where they do."""
    return _prefill_valid(PrefillConfig(max(16, power_of_2(shape["group_size"])), 16, 8, 1), device, shape)


def _prefill_space(device: Device, shape: Mapping[str, int]) -> Iterator[PrefillConfig]:
    for block_m, block_n, num_warps, num_stages in product((32, 64, 128), (32, 64, 128), (4, 8), (1, 2, 3, 4)):
        yield PrefillConfig(block_m, block_n, num_warps, num_stages)


def _prefill_valid(config: PrefillConfig, device: Device, shape: Mapping[str, int]) -> str | None:
    if config.block_m < shape["group_size"]:
        return f"a tile of {config.block_m} rows cannot hold one query of {shape['group_size']} heads"
    tile = 2 * config.block_n * _width(shape) * shape["cache_bytes"]
    needed = config.num_stages * tile + config.block_m * _width(shape) * shape["q_bytes"]
    needed += _extra(config.block_m, config.block_n, shape)
    if device.shared_per_block and needed > device.shared_per_block - 2048:
        return f"{config} needs {needed} bytes of shared memory; a block has {device.shared_per_block}"
    return None


def _prefill_bucket(shape: Mapping[str, int]) -> tuple[int, ...]:
    sizes = (power_of_2(shape["tokens"]), power_of_2(shape["visible_keys"]), _width(shape))
    return (*sizes, *(shape[name] for name in ("cache_bytes", "q_bytes", "group_size", "page_size")))


SPLIT_KV = Tunable(
    "decode_split_kv", SplitKVConfig, _split_kv_heuristic, _split_kv_space, _split_kv_valid, _split_kv_bucket
)
HOPPER = Tunable(
    "decode_split_kv_hopper", HopperConfig, _hopper_heuristic, _hopper_space, _hopper_valid, _hopper_bucket
)
COMBINE = Tunable("decode_combine", CombineConfig, _combine_heuristic, _combine_space, _combine_valid, _combine_bucket)
PREFILL = Tunable("paged_attention", PrefillConfig, _prefill_heuristic, _prefill_space, _prefill_valid, _prefill_bucket)
