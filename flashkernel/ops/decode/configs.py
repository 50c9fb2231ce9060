"""Launch configs of the decoding kernels: how much of the cache a tile holds, how many tiles are in flight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from flashkernel.core.device import Device
from flashkernel.core.tune import Tunable, power_of_2
from flashkernel.core.tune import head_block as block

_LONG_RING = 32  # tiles a multiprocessor has to read from which two programs on it beat one with twice the ring
TILE_BYTES = 16384  # of keys, and as much of values: what keeps a multiprocessor's share of the bandwidth in flight
RING_EXTRA = 2048  # bytes of shared memory beside the Hopper kernel's tiles: barriers, and what the system takes
RING_SHARED_WIDTH = 128  # head width up to which the registers of a multiprocessor hold two Hopper programs
RING_LEFT = 16384  # bytes that are left free for the combining kernel, which waits beside it
SHORT = 512  # keys up to which a unit is one program's: one launch beats a finer split and its combining


@dataclass(frozen=True)
class Walk:
    """A tile is `rows` query rows by `keys` keys of `heads` key/value heads; `stages` tiles are in flight.

    With `split`, `per_sm` programs on each multiprocessor share all tiles equally; else a program takes a unit.
    With `overlap` the combining kernel takes its place while the first still runs (sm_90).
    """

    keys: int
    heads: int
    rows: int
    warps: int
    stages: int
    per_sm: int
    split: bool
    overlap: bool


@dataclass(frozen=True)
class Ring:
    """The Hopper kernel: `per_sm` programs on each multiprocessor, each with `stages` tiles in flight: `keys` keys, and
    as many values."""

    keys: int
    stages: int
    per_sm: int


@dataclass(frozen=True)
class Combine:
    """`rows` rows of one unit a program, `pieces` parts of them at a time."""

    rows: int
    pieces: int
    warps: int


@dataclass(frozen=True)
class Tiles:
    """Prefill: a tile of `rows` (query, head) rows by `keys` keys."""

    rows: int
    keys: int
    warps: int
    stages: int


def _width(shape: Mapping[str, int]) -> int:
    return max(16, power_of_2(max(shape["head_dim"], shape["value_dim"])))


def _bucket(shape: Mapping[str, int]) -> tuple[int, ...]:
    """Batch and span by powers of two; the rest exactly, since tiles depend on it."""
    sizes = (power_of_2(shape["batch"]), power_of_2(shape["span"]), _width(shape), shape["span"] > SHORT)
    return (*sizes, *(shape[name] for name in ("bytes", "compute", "queries", "group", "kv_heads", "page")))


def _walk_heuristic(device: Device, shape: Mapping[str, int]) -> Walk:
    width = _width(shape)
    rows = shape["queries"] * shape["group"]
    columns = max(16, min(128, TILE_BYTES // (width * shape["compute"])))
    # Narrow heads come in pairs: 256 neighbouring bytes of a token, and rows that would be padding.
    pair = width * shape["bytes"] < 256 and shape["kv_heads"] % 2 == 0 and 2 * rows <= 16
    heads = 2 if pair else 1
    height = max(16, min(64 if width <= 256 else 16, power_of_2(heads * rows)))
    keys = max(16 // heads, min(columns // heads, power_of_2(shape["span"])))
    units = shape["batch"] * shape["kv_heads"]
    many = device.arch >= 90 and 2 * units >= device.sms and height == 16 and shape["bytes"] == 2
    split = shape["span"] > (2 * SHORT if many else SHORT)
    per_sm = 2 if device.kind == "cuda" else 5  # a CPU, under the interpreter, is one multiprocessor
    config = Walk(keys, heads, height, 4, 3, per_sm, split, device.arch >= 90)
    if many and width == 128 and split and shape["page"] == 0:
        config = replace(config, keys=2 * keys, warps=8, per_sm=1)  # long walks: fewer, larger steps
    elif many and width == 64 and units <= 2 * device.sms:
        config = replace(config, keys=128, heads=1, per_sm=1)  # a head each, whole where lengths are alike
    elif many and width == 64 and not split:
        config = replace(config, keys=64, heads=1, stages=4)  # small, so that several fit a multiprocessor
    while _walk_valid(config, device, shape) and config.stages > 1:
        config = replace(config, stages=config.stages - 1)
    if _walk_valid(config, device, shape):
        config = replace(config, per_sm=1)
    while _walk_valid(config, device, shape) and config.rows > 16:
        config = replace(config, rows=config.rows // 2)
    return config


def _walk_space(device: Device, shape: Mapping[str, int]) -> Iterator[Walk]:
    base = _walk_heuristic(device, shape)
    for heads in (1, 2, 4):
        rows = max(16, power_of_2(heads * shape["queries"] * shape["group"]))
        for keys in (16, 32, 64, 128, 256):
            for warps in (2, 4, 8):
                for stages in (2, 3, 4, 5):
                    for per_sm in (1, 2, 3, 4):
                        for overlap in {False, base.overlap}:
                            yield Walk(keys, heads, min(rows, 64), warps, stages, per_sm, base.split, overlap)


def _walk_valid(config: Walk, device: Device, shape: Mapping[str, int]) -> str | None:
    if shape["kv_heads"] % config.heads:
        return f"{shape['kv_heads']} key/value heads cannot be taken {config.heads} at a time"
    if config.overlap and device.arch < 90:
        return "a kernel can be launched before its predecessor's end from sm_90 on"
    if config.keys * config.heads < 16:
        return "a tile must have 16 columns at least, as tensor cores do"
    tile = 2 * config.keys * config.heads * _width(shape) * shape["bytes"]
    needed = max(1, config.stages - 1) * tile + config.rows * _width(shape) * shape["compute"]
    programs = config.per_sm if config.split else 1
    if device.shared_per_sm and programs * (needed + 4096) > device.shared_per_sm:
        return f"{programs} programs of {needed} bytes do not fit a multiprocessor's shared memory"
    needed += _extra(config.rows, config.keys * config.heads, shape)
    if device.shared_per_block and needed > device.shared_per_block - 2048:
        return f"{config} needs {needed} bytes of shared memory; a block has {device.shared_per_block}"
    return None


def _extra(rows: int, keys: int, shape: Mapping[str, int]) -> int:
    """Bytes of shared memory beside the tiles: a tile of keys, or of values, that is widened from a quantised cache
    before it is multiplied, and the probabilities, which go through it in float32."""
    widened = keys * _width(shape) * shape["compute"] if shape["bytes"] < shape["compute"] else 0
    return widened + (4 * rows * keys if shape["compute"] == 4 else 0)


def _ring_bytes(config: Ring, shape: Mapping[str, int]) -> int:
    return 4 * config.stages * config.keys * block(shape["head_dim"]) + RING_EXTRA


def _ring_heuristic(device: Device, shape: Mapping[str, int]) -> Ring:
    width = block(shape["head_dim"])
    keys = max(32, min(128, TILE_BYTES // (2 * width)))
    room = device.shared_per_sm - RING_LEFT
    tiles = shape["batch"] * shape["kv_heads"] * shape["span"] // keys
    if tiles < _LONG_RING * device.sms or width > RING_SHARED_WIDTH:
        return Ring(keys, max(2, room // (4 * keys * width)), 1)
    if shape["page"] == 0 and width == 128:
        return Ring(2 * keys, max(2, room // (8 * keys * width)), 1)
    return Ring(keys, max(2, room // 2 // (4 * keys * width)), 2)  # one multiplies while the other waits


def _ring_space(device: Device, shape: Mapping[str, int]) -> Iterator[Ring]:
    for keys in (32, 64, 128):
        for per_sm in (1, 2):
            most = (device.shared_per_sm // per_sm - RING_EXTRA) // (4 * keys * block(shape["head_dim"]))
            for stages in (most - 1, most):
                yield Ring(keys, stages, per_sm)


def _ring_valid(config: Ring, device: Device, shape: Mapping[str, int]) -> str | None:
    if config.stages < 2:
        return f"{config} has nothing in flight while a tile is multiplied; it takes two stages"
    most = 32 if block(shape["head_dim"]) == 256 else 128  # that the registers hold
    if config.keys not in (32, 64, 128) or config.keys > most:
        return f"a tile cannot have {config.keys} keys; it has 32, 64 or 128, and at most {most} of such heads"
    if config.per_sm > 1 and block(shape["head_dim"]) > RING_SHARED_WIDTH:
        return f"heads of {shape['head_dim']} need the registers of a multiprocessor for one program"
    needed = _ring_bytes(config, shape)
    if needed > device.shared_per_block or config.per_sm * needed > device.shared_per_sm:
        return f"{config.per_sm} programs of {needed} bytes do not fit a multiprocessor's shared memory"
    return None


def _ring_bucket(shape: Mapping[str, int]) -> tuple[int, ...]:
    sizes = (power_of_2(shape["batch"]), power_of_2(shape["span"]), block(shape["head_dim"]))
    return (*sizes, shape["rows"], shape["kv_heads"], shape["page"])


def _combine_heuristic(device: Device, shape: Mapping[str, int]) -> Combine:
    """Few units: a row a program, so that the parts are read by many; many units: all their rows at once."""
    width = max(16, power_of_2(shape["value_dim"]))
    rows = power_of_2(shape["rows"]) if shape["units"] * shape["rows"] > 8 * device.sms else 1
    rows = max(1, min(rows, 1024 // width))
    typical = power_of_2(2 * shape["programs"] // max(1, shape["units"]))
    return Combine(rows, max(2, min(typical, 64, 8192 // (rows * width))), 4)


def _combine_space(device: Device, shape: Mapping[str, int]) -> Iterator[Combine]:
    for rows in (1, 2, 4, 8, 16):
        for pieces in (2, 4, 8, 16, 32, 64):
            for warps in (1, 2, 4, 8):
                yield Combine(rows, pieces, warps)


def _combine_valid(config: Combine, device: Device, shape: Mapping[str, int]) -> str | None:
    each = config.rows * config.pieces * max(16, power_of_2(shape["value_dim"])) / (32 * config.warps)
    return None if each <= 128 else f"{each:.0f} values a thread do not fit its registers"


def _combine_bucket(shape: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(power_of_2(shape[name]) for name in ("units", "rows", "programs", "value_dim"))


# Tiles by head size, the largest that do not spill.
_HOPPER = {64: Tiles(128, 64, 4, 3), 128: Tiles(128, 128, 8, 2), 256: Tiles(128, 32, 8, 2), 512: Tiles(64, 16, 8, 1)}
_AMPERE = {64: Tiles(128, 64, 8, 2), 128: Tiles(64, 32, 4, 2), 256: Tiles(64, 32, 8, 1), 512: Tiles(32, 16, 8, 1)}


def _tiles_heuristic(device: Device, shape: Mapping[str, int]) -> Tiles:
    table = _HOPPER if device.arch >= 90 or device.kind == "cpu" else _AMPERE
    config = table[max(64, _width(shape))]
    rows = max(16, min(config.rows, power_of_2(shape["tokens"] * shape["group"])))
    keys = max(16, min(config.keys, power_of_2(shape["span"])))
    config = replace(config, rows=max(rows, power_of_2(shape["group"])), keys=keys)
    while reason := _tiles_valid(config, device, shape):
        if config.stages > 1:
            config = replace(config, stages=config.stages - 1)
        elif config.rows > max(16, power_of_2(shape["group"])):
            config = replace(config, rows=config.rows // 2)
        elif config.keys > 16:
            config = replace(config, keys=config.keys // 2)
        else:
            raise ValueError(reason)
    return config


def too_large(device: Device, group: int, head_dim: int, value_dim: int, stored: int, compute: int) -> str | None:
    """Why not even the smallest tiles of prefill fit in a block's shared memory; None where they do."""
    shape = {"group": group, "head_dim": head_dim, "value_dim": value_dim, "bytes": stored, "compute": compute}
    return _tiles_valid(Tiles(max(16, power_of_2(group)), 16, 8, 1), device, shape)


def _tiles_space(device: Device, shape: Mapping[str, int]) -> Iterator[Tiles]:
    for rows in (32, 64, 128):
        for keys in (32, 64, 128):
            for warps in (4, 8):
                for stages in (1, 2, 3, 4):
                    yield Tiles(rows, keys, warps, stages)


def _tiles_valid(config: Tiles, device: Device, shape: Mapping[str, int]) -> str | None:
    if config.rows < shape["group"]:
        return f"a tile of {config.rows} rows cannot hold one query of {shape['group']} heads"
    tile = 2 * config.keys * _width(shape) * shape["bytes"]
    needed = config.stages * tile + config.rows * _width(shape) * shape["compute"]
    needed += _extra(config.rows, config.keys, shape)
    if device.shared_per_block and needed > device.shared_per_block - 2048:
        return f"{config} needs {needed} bytes of shared memory; a block has {device.shared_per_block}"
    return None


def _tiles_bucket(shape: Mapping[str, int]) -> tuple[int, ...]:
    sizes = (power_of_2(shape["tokens"]), power_of_2(shape["span"]), _width(shape))
    return (*sizes, *(shape[name] for name in ("bytes", "compute", "group", "page")))


WALK = Tunable("decode_walk", Walk, _walk_heuristic, _walk_space, _walk_valid, _bucket)
RING = Tunable("decode_ring", Ring, _ring_heuristic, _ring_space, _ring_valid, _ring_bucket)
COMBINE = Tunable("decode_combine", Combine, _combine_heuristic, _combine_space, _combine_valid, _combine_bucket)
TILES = Tunable("paged_attention", Tiles, _tiles_heuristic, _tiles_space, _tiles_valid, _tiles_bucket)
