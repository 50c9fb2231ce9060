"""Launch configs of the CUDA C++ attention backward kernel: tiles, warps and buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from flashkernel.core.device import Device
from flashkernel.core.tune import Tunable
from flashkernel.ops.attention.cuda.configs import padded_dim

MAX_DIM = 128


@dataclass(frozen=True)
class BackwardConfig:
    """A block of `block_n` keys, against blocks of `block_m` queries.

    Attributes:
        block_m: queries of a tile.
        block_n: keys of a tile.
        key_warps: warps along the keys.
        query_warps: warps along the queries, which share keys and split the columns of dK and dV.
        stages: buffers of Q; one where tiles wait in registers, before sm_80.
        do_stages: buffers of dO.
        min_blocks: blocks of an SM that must find registers.
    """

    block_m: int
    block_n: int
    key_warps: int
    query_warps: int
    stages: int = 2
    do_stages: int = 2
    min_blocks: int = 1

    @property
    def num_warps(self) -> int:
        return self.key_warps * self.query_warps

    @property
    def template(self) -> str:
        """The template arguments behind the type and the head widths."""
        warps = f"{self.key_warps}, {self.query_warps}"
        return f"{self.block_m}, {self.block_n}, {warps}, {self.stages}, {self.do_stages}, {self.min_blocks}"

    def shared_bytes(self, head_dim: int, value_dim: int) -> int:
        """K, V, Q, dO, dS, P where warps exchange it, and LSE and delta."""
        keys = self.block_n * (head_dim + value_dim)
        queries = self.block_m * (self.stages * head_dim + self.do_stages * value_dim)
        scores = self.block_m * self.block_n * (2 if self.query_warps > 1 else 1)
        return 2 * (keys + queries + scores) + self.stages * 2 * 4 * self.block_m


def _heuristic(device: Device, shape: Mapping[str, int]) -> BackwardConfig:
    dim = max(padded_dim(shape["head_dim"]), padded_dim(shape["value_dim"]))
    if not shape["asynchronous"]:  # Turing: the next tile waits in registers
        return BackwardConfig(64, 64, 4, 2, 1, 1) if dim == 64 else BackwardConfig(32, 64, 4, 2, 1, 1)
    if dim == 64:
        large, small = BackwardConfig(128, 128, 4, 2), BackwardConfig(64, 128, 4, 2)
    else:
        large, small = BackwardConfig(64, 128, 4, 2), BackwardConfig(64, 64, 4, 2, do_stages=1)
    # The large tiles take 192 accumulators: no register is left for a bias, a score function or dropout.
    return large if shape["plain"] and _valid(large, device, shape) is None else small


def _space(device: Device, shape: Mapping[str, int]) -> Iterator[BackwardConfig]:
    stages = 2 if shape["asynchronous"] else 1
    for block_m in (32, 64, 128):
        for block_n in (64, 128):
            for key_warps, query_warps in ((4, 1), (2, 2), (4, 2), (8, 1)):
                for do_stages in range(1, stages + 1):
                    for min_blocks in (1, 2, 3):
                        yield BackwardConfig(
                            block_m, block_n, key_warps, query_warps, stages, do_stages, min_blocks
                        )  # fmt: skip


def _valid(config: BackwardConfig, device: Device, shape: Mapping[str, int]) -> str | None:
    head_dim, value_dim = padded_dim(shape["head_dim"]), padded_dim(shape["value_dim"])
    if max(head_dim, value_dim) > MAX_DIM:
        return f"heads must be at most {MAX_DIM} wide"
    if config.stages != (2 if shape["asynchronous"] else 1) or config.do_stages > config.stages:
        return f"{config}: two buffers with asynchronous copies, one without"
    if config.block_n % (16 * config.key_warps) or config.block_m % (16 * config.query_warps):
        return f"{config}: a warp multiplies 16 rows and columns at a time"
    rows, columns = config.block_n // config.key_warps, config.block_m // config.query_warps
    accumulators = (2 * rows * columns + rows * (head_dim + value_dim) // config.query_warps) // 32
    if accumulators > (192 if shape["plain"] else 128):
        return f"{config} needs {accumulators} registers for accumulators"
    if 2 * config.block_m > 32 * config.num_warps or config.num_warps * config.min_blocks > 16:
        return f"{config}: a thread copies one number of LSE or delta; 16 warps of an SM find registers"
    needed = config.shared_bytes(head_dim, value_dim)
    if needed > device.shared_per_block:
        return f"{config} needs {needed} bytes of shared memory; a block has {device.shared_per_block}"
    return None


def _bucket(shape: Mapping[str, int]) -> tuple[int, ...]:
    return (padded_dim(shape["head_dim"]), padded_dim(shape["value_dim"]), shape["asynchronous"], shape["plain"])


BACKWARD = Tunable("attention_cuda_backward", BackwardConfig, _heuristic, _space, _valid, _bucket)
