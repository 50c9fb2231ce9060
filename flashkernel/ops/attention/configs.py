"""Launch configs of the attention kernels: tile sizes, warps and stages, from the device and the head size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from flashkernel.core.device import Device
from flashkernel.core.tune import Tunable, power_of_2
from flashkernel.core.versions import triton_version

Valid = Callable[["AttentionConfig", Device, Mapping[str, int]], "str | None"]


@dataclass(frozen=True)
class AttentionConfig:
    """AttentionConfig of `block_m` queries by `block_n` keys."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def _block_dims(shape: Mapping[str, int]) -> tuple[int, int]:
    """(BLOCK_D, BLOCK_DV): the columns of a tile of q or k, and of v or o."""
    return max(16, power_of_2(shape["head_dim"])), max(16, power_of_2(shape["value_dim"]))


def _bucket(shape: Mapping[str, int]) -> tuple[int, ...]:
    sizes = [power_of_2(shape[name]) for name in ("seqlen_q", "seqlen_k", "max_visible_keys")]
    return (*sizes, *_block_dims(shape), shape["bytes"], shape["gathers"])


def _too_much(
    device: Device, shape: Mapping[str, int], config: AttentionConfig, resident: int, streamed: int
) -> str | None:
    """Why elements that stay for the whole loop over tiles, and those in flight, do not fit in shared memory.

    In float32 probabilities go through it as well, and so does a bias; the tile that is multiplied is one of those in
    flight.
    """
    needed = (resident + streamed * config.num_stages) * shape["bytes"]
    if shape["bytes"] == 4:
        pairs = config.block_m * config.block_n * (1 + shape["gathers"])
        full = (resident + streamed * max(1, config.num_stages - 1) + pairs) * 4
        needed = max(needed, full) if device.arch >= 90 else full
    if device.shared_per_block == 0 or needed <= device.shared_per_block - 2048:
        return None
    return f"{config} needs {needed} bytes of shared memory; a block has {device.shared_per_block}"


def _forward_valid(config: AttentionConfig, device: Device, shape: Mapping[str, int]) -> str | None:
    block_d, block_dv = _block_dims(shape)
    return _too_much(device, shape, config, config.block_m * block_d, config.block_n * (block_d + block_dv))


def _queries_valid(config: AttentionConfig, device: Device, shape: Mapping[str, int]) -> str | None:
    both = sum(_block_dims(shape))
    return _too_much(device, shape, config, config.block_m * both, config.block_n * both)


def _keys_valid(config: AttentionConfig, device: Device, shape: Mapping[str, int]) -> str | None:
    both = sum(_block_dims(shape))
    return _too_much(device, shape, config, config.block_n * both, config.block_m * both)


def too_wide(device: Device, head_dim: int, value_dim: int, element_size: int) -> str | None:
    """Why not even the smallest tiles of such heads fit in a block's shared memory; None where they do."""
    shape = {"head_dim": head_dim, "value_dim": value_dim, "bytes": element_size, "gathers": 1}
    reasons = (valid(_SMALLEST, device, shape) for valid in (_forward_valid, _queries_valid, _keys_valid))
    return next((reason for reason in reasons if reason), None)


_SMALLEST = AttentionConfig(16, 16, 8, 1)
# By head size: the best configs that were tried. On Hopper that is one warpgroup, and several programs on an SM: while
# one waits, the next computes.
_HOPPER = {
    "forward": {
        64: AttentionConfig(64, 128, 4, 2),
        128: AttentionConfig(64, 64, 4, 3),
        256: AttentionConfig(128, 64, 8, 2),
        512: AttentionConfig(64, 16, 8, 1),
    },
    "queries": {
        64: AttentionConfig(64, 64, 4, 3),
        128: AttentionConfig(128, 64, 8, 3),
        256: AttentionConfig(64, 32, 4, 2),
        512: AttentionConfig(32, 16, 8, 1),
    },
    "keys": {
        64: AttentionConfig(64, 64, 4, 2),
        128: AttentionConfig(64, 64, 4, 2),
        256: AttentionConfig(32, 64, 4, 2),
        512: AttentionConfig(16, 16, 8, 1),
    },
}
# From triton 3.9 on: its code needs more registers, and would spill in the loop with the tiles above.
_HOPPER_LATER = {
    ("keys", 128): AttentionConfig(32, 64, 4, 2),
}
# (kernel, head size): (visible keys, config). Where a tile of queries sees at most so many keys, smaller tiles waste
# less at both ends.
_HOPPER_SHORT = {
    ("forward", 64): (1024, AttentionConfig(64, 64, 4, 2)),
    ("queries", 64): (4096, AttentionConfig(64, 32, 4, 3)),
    ("queries", 128): (1024, AttentionConfig(64, 64, 4, 2)),
}
_AMPERE = {
    "forward": {
        64: AttentionConfig(128, 64, 8, 2),
        128: AttentionConfig(64, 32, 4, 2),
        256: AttentionConfig(64, 32, 8, 1),
        512: AttentionConfig(32, 16, 8, 1),
    },
    "queries": {
        64: AttentionConfig(64, 32, 8, 2),
        128: AttentionConfig(64, 32, 8, 1),
        256: AttentionConfig(32, 32, 8, 1),
        512: AttentionConfig(16, 16, 8, 1),
    },
    "keys": {
        64: AttentionConfig(32, 64, 8, 2),
        128: AttentionConfig(32, 64, 8, 1),
        256: AttentionConfig(32, 32, 8, 1),
        512: AttentionConfig(16, 16, 8, 1),
    },
}
# float32 is multiplied without tensor cores: every thread unrolls its share of a tile, so that large tiles take minutes
# to compile and spill.
_FLOAT32 = {
    64: AttentionConfig(32, 64, 8, 1),
    128: AttentionConfig(32, 32, 8, 1),
}


def _heuristic(kind: str, valid: Valid) -> Callable[[Device, Mapping[str, int]], AttentionConfig]:
    def choose(device: Device, shape: Mapping[str, int]) -> AttentionConfig:
        width = max(64, *_block_dims(shape))
        if shape["bytes"] == 4 and device.kind != "cpu" and width in _FLOAT32:
            return _shrunk(_FLOAT32[width], device, shape, valid)
        if device.arch < 90 and device.kind != "cpu":
            return _shrunk(_AMPERE[kind][width], device, shape, valid)
        usual = _HOPPER[kind][width]
        if (triton_version() or (0, 0)) >= (3, 9):
            usual = _HOPPER_LATER.get((kind, width), usual)
        most, short = _HOPPER_SHORT.get((kind, width), (0, usual))
        return _shrunk(short if shape["max_visible_keys"] <= most else usual, device, shape, valid)

    return choose


def _shrunk(choice: AttentionConfig, device: Device, shape: Mapping[str, int], valid: Valid) -> AttentionConfig:
    """A config no larger than the sequences, and as small as the shared memory demands."""
    block_m = min(choice.block_m, max(16, power_of_2(shape["seqlen_q"])))
    block_n = min(choice.block_n, max(16, power_of_2(shape["seqlen_k"])))
    config = AttentionConfig(block_m, block_n, choice.num_warps, choice.num_stages)
    while valid(config, device, shape) and (config.num_stages > 1 or max(config.block_m, config.block_n) > 16):
        if config.num_stages > 1:
            config = AttentionConfig(config.block_m, config.block_n, config.num_warps, config.num_stages - 1)
        elif config.block_n >= config.block_m:
            config = AttentionConfig(config.block_m, config.block_n // 2, config.num_warps, 1)
        else:
            config = AttentionConfig(config.block_m // 2, config.block_n, config.num_warps, 1)
    return config


def _space(device: Device, shape: Mapping[str, int]) -> Iterator[AttentionConfig]:
    for block_m in (32, 64, 128):
        for block_n in (32, 64, 128):
            for num_warps in (4, 8):
                for num_stages in (1, 2, 3, 4):
                    yield AttentionConfig(block_m, block_n, num_warps, num_stages)


def _tunable(name: str, kind: str, valid: Valid) -> Tunable:
    return Tunable(name, AttentionConfig, _heuristic(kind, valid), _space, valid, _bucket)


FORWARD = _tunable("attention_forward", "forward", _forward_valid)
BACKWARD_KEYS = _tunable("attention_backward_keys", "keys", _keys_valid)
BACKWARD_QUERIES = _tunable("attention_backward_queries", "queries", _queries_valid)
