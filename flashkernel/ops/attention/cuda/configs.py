"""Launch configs of the CUDA C++ attention kernels: tiles and warps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from flashkernel.core.device import Device
from flashkernel.core.tune import Tunable, power_of_2

MAX_DIM = 256


def padded_dim(dim: int) -> int:
    """The head width that a kernel is compiled for: 64, 128 or 256."""
    return max(64, power_of_2(dim))


@dataclass(frozen=True)
class ForwardConfig:
    """`num_warps` warps of block_m / num_warps queries each, against blocks of `block_n` keys."""

    block_m: int
    block_n: int
    num_warps: int

    @property
    def template(self) -> str:
        """The template arguments behind the type and the head widths."""
        return f"{self.block_m}, {self.block_n}, {self.num_warps}"

    def shared_bytes(self, head_dim: int, value_dim: int) -> int:
        """Q, K and V, and the row sums where registers have no room; O goes through the same memory at the end."""
        loaded = self.block_m * head_dim + self.block_n * (head_dim + value_dim)
        registers = self.block_m * (self.block_n + value_dim) // (32 * self.num_warps)  # of a thread, for S and O
        row_sums = 16 * self.block_m if registers >= 192 else 0  # keeps_sums_in_shared of forward.cu
        return 2 * max(loaded, self.block_m * value_dim) + row_sums


# By padded head width: (usual, with extras). With extras (bias, score function, dropout, rotation, tables ...) a thread
# needs registers for more than S and O, and tiles of S are smaller.
_ASYNCHRONOUS = {
    64: (ForwardConfig(128, 128, 4), ForwardConfig(64, 48, 4)),
    128: (ForwardConfig(128, 64, 4), ForwardConfig(64, 48, 4)),
    256: (ForwardConfig(64, 64, 4), ForwardConfig(64, 16, 4)),
}
_BLACKWELL = {128: (ForwardConfig(128, 32, 4), ForwardConfig(64, 48, 4))}
# Turing: the next tile waits in registers.
_SYNCHRONOUS = {
    64: (ForwardConfig(128, 64, 4), ForwardConfig(64, 64, 4)),
    128: (ForwardConfig(64, 64, 4), ForwardConfig(64, 32, 4)),
    256: (ForwardConfig(64, 16, 4), ForwardConfig(64, 16, 4)),
}


def _heuristic(device: Device, shape: Mapping[str, int]) -> ForwardConfig:
    dim = max(padded_dim(shape["head_dim"]), padded_dim(shape["value_dim"]))
    choices = _SYNCHRONOUS if device.arch < 80 else _ASYNCHRONOUS
    if device.arch >= 100:
        choices = {**choices, **_BLACKWELL}
    return choices[dim][shape["extras"]]


def _space(device: Device, shape: Mapping[str, int]) -> Iterator[ForwardConfig]:
    for block_m in (64, 128):
        for block_n in (16, 32, 48, 64, 96, 112, 128):
            for num_warps in (4, 8):
                yield ForwardConfig(block_m, block_n, num_warps)


def _valid(config: ForwardConfig, device: Device, shape: Mapping[str, int]) -> str | None:
    if config.block_m % (16 * config.num_warps) or config.block_n % 16:
        return f"{config}: a warp multiplies 16 rows at a time"
    needed = config.shared_bytes(padded_dim(shape["head_dim"]), padded_dim(shape["value_dim"]))
    if needed > device.shared_per_block:
        return f"{config} needs {needed} bytes of shared memory; a block has {device.shared_per_block}"
    return None


def _bucket(shape: Mapping[str, int]) -> tuple[int, ...]:
    return (padded_dim(shape["head_dim"]), padded_dim(shape["value_dim"]), shape["extras"])


FORWARD = Tunable("attention_cuda_forward", ForwardConfig, _heuristic, _space, _valid, _bucket)
