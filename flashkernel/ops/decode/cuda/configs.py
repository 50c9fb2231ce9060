"""Launch configs of the CUDA C++ decoding kernels: warps, keys per warp, stages in flight, programs per SM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from flashkernel.core.device import Device
from flashkernel.core.tune import Tunable, head_block

MAX_DIM = 256
MERGE_ROW = 72  # floats of a row in the merge of a block's warps, as in split_kv.cu
RESERVED = 1024  # bytes of shared memory that the system takes for each block


def padded_dim(head_dim: int, value_dim: int) -> int:
    """The width that a kernel is compiled for: 64, 128 or 256."""
    return head_block(max(head_dim, value_dim))


@dataclass(frozen=True)
class SplitConfig:
    """`num_warps` warps, each with `keys` keys of a K block and `num_stages` tiles of them in shared memory.

    `num_stages` is 1 before sm_80: a tile waits in registers. The grid has `programs_per_sm` programs per SM.
    """

    num_warps: int
    keys: int
    num_stages: int
    programs_per_sm: int

    @property
    def block_n(self) -> int:
        """Keys of a K block."""
        return self.num_warps * self.keys

    def shared_bytes(self, dim: int, block_m: int, cache_bytes: int) -> int:
        """Q, the warps' pipelines (or their merge), scales, row statistics, schedule, as split_kv.cu lays them out."""
        tile = self.keys * dim * cache_bytes
        buffers = 1 if self.num_stages == 1 else 2 * self.num_stages
        pipelines = max(self.num_warps * buffers * tile, self.num_warps * block_m * MERGE_ROW * 4)
        scales = self.num_warps * self.num_stages * 2 * self.keys * 4 if cache_bytes == 1 else 0
        return block_m * dim * 2 + pipelines + scales + self.num_warps * block_m * 8 + (2 * self.num_warps + 2) * 4


@dataclass(frozen=True)
class PrefillConfig:
    """`num_warps` warps of 16 (query, head) rows against blocks of `block_n` keys."""

    num_warps: int
    block_n: int

    @property
    def block_m(self) -> int:
        """(query, head) rows of a block."""
        return 16 * self.num_warps

    def shared_bytes(self, dim: int, cache_bytes: int) -> int:
        """Q, K, V, and the scales of two tiles, as prefill.cu lays them out."""
        scales = 4 * self.block_n * 4 if cache_bytes == 1 else 0
        return self.block_m * dim * 2 + 2 * self.block_n * dim * cache_bytes + scales


def block_m(device: Device, dim: int, rows: int, cache_bytes: int) -> int:
    """(query, head) rows of a work tile: 32 where a call has so many and the registers hold their O."""
    widest = 128 if cache_bytes == 2 else 64  # a quantized cache takes registers to widen
    return 32 if rows > 16 and dim <= widest and device.arch >= 80 else 16


def _split_heuristic(device: Device, shape: Mapping[str, int]) -> SplitConfig:
    """4 to 8 KB of K and V per warp and stage; as many stages as leave room for two programs per SM."""
    asynchronous = device.arch >= 80
    stages = (4, 3, 2) if asynchronous else (1,)
    keys = 16 if shape["dim"] * (shape["cache_bytes"] if asynchronous else 2) >= 256 else 32
    choices = [SplitConfig(warps, keys, count, programs) for warps, programs, count in product((4, 2), (2, 1), stages)]
    return next((config for config in choices if _split_valid(config, device, shape) is None), choices[-1])


def _split_space(device: Device, shape: Mapping[str, int]) -> Iterator[SplitConfig]:
    stages = (1,) if device.arch < 80 else (2, 3, 4, 5)
    for num_warps, keys, num_stages, programs in product((2, 4, 8), (16, 32), stages, (1, 2, 3, 4)):
        yield SplitConfig(num_warps, keys, num_stages, programs)


def _split_valid(config: SplitConfig, device: Device, shape: Mapping[str, int]) -> str | None:
    if (config.num_stages == 1) != (device.arch < 80):
        return "one stage is for GPUs without asynchronous copies, and for those alone"
    needed = config.shared_bytes(shape["dim"], shape["block_m"], shape["cache_bytes"])
    if needed > device.shared_per_block:
        return f"{config} needs {needed} bytes of shared memory; a block has {device.shared_per_block}"
    if config.programs_per_sm * (needed + RESERVED) > device.shared_per_sm:
        return f"{config.programs_per_sm} programs of {needed} bytes do not fit an SM's shared memory"
    return None


def _split_bucket(shape: Mapping[str, int]) -> tuple[int, ...]:
    return shape["dim"], shape["block_m"], shape["cache_bytes"]


def _prefill_heuristic(device: Device, shape: Mapping[str, int]) -> PrefillConfig:
    wide = 32 if device.arch >= 80 else 16
    return PrefillConfig(4, 64 if shape["dim"] <= 128 else wide)


def _prefill_space(device: Device, shape: Mapping[str, int]) -> Iterator[PrefillConfig]:
    for num_warps, block_n in product((2, 4, 8), (16, 32, 64)):
        yield PrefillConfig(num_warps, block_n)


def _prefill_valid(config: PrefillConfig, device: Device, shape: Mapping[str, int]) -> str | None:
    needed = config.shared_bytes(shape["dim"], shape["cache_bytes"])
    if needed > device.shared_per_block:
        return f"{config} needs {needed} bytes of shared memory; a block has {device.shared_per_block}"
    return None


def _prefill_bucket(shape: Mapping[str, int]) -> tuple[int, ...]:
    return shape["dim"], shape["cache_bytes"]


SPLIT = Tunable("decode_split_kv_cuda", SplitConfig, _split_heuristic, _split_space, _split_valid, _split_bucket)
PREFILL = Tunable(
    "paged_attention_cuda", PrefillConfig, _prefill_heuristic, _prefill_space, _prefill_valid, _prefill_bucket
)
