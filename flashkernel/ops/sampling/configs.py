"""Launch configs of the sampling kernels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from flashkernel.core.device import Device
from flashkernel.core.tune import Tunable, power_of_2
from flashkernel.core.versions import triton_version

MAX_CHUNKS = 256  # chunk sums of a row are read at once


@dataclass(frozen=True)
class SampleConfig:
    """Columns of a chunk, and warps of either kernel.

    Attributes:
        chunk: Columns of which one program of the first kernel computes maximum and sum, and which the second kernel
            reads at a time.
        chunk_warps: Warps of the first kernel.
        row_warps: Warps of the second kernel.
        num_stages: Chunks that the second kernel loads ahead.
    """

    chunk: int
    chunk_warps: int
    row_warps: int
    num_stages: int

    @property
    def max_registers(self) -> int:
        """Registers of a thread of the second kernel: of 65,536 two programs of up to 16 warps have half each."""
        return min(255, max(64, 1024 // self.row_warps))


def _bucket(shape: Mapping[str, int]) -> tuple[int, ...]:
    return (power_of_2(shape["vocab"]), shape["bytes"])


def _heuristic(device: Device, shape: Mapping[str, int]) -> SampleConfig:
    """4 values a thread in the search: with its sums, two programs of 16 warps fit the registers of an SM. Triton 3.9
    spills with 64 registers: there they have 8 warps."""
    vocab = max(16, power_of_2(shape["vocab"]))
    max_warps = 8 if (triton_version() or (0, 0)) >= (3, 9) else 16
    chunk = min(vocab, max(128 * max_warps, vocab // MAX_CHUNKS))
    warps = max(1, min(max_warps, chunk // 128))
    return SampleConfig(chunk, max(1, min(8, chunk // 512)), warps, 4)


def _space(device: Device, shape: Mapping[str, int]) -> Iterator[SampleConfig]:
    for chunk in (2048, 4096, 8192):
        for row_warps in (8, 16, 32):
            for num_stages in (1, 2, 3, 4):
                yield SampleConfig(chunk, 8, row_warps, num_stages)


def _valid(config: SampleConfig, device: Device, shape: Mapping[str, int]) -> str | None:
    chunks = -(-shape["vocab"] // config.chunk)
    if chunks > MAX_CHUNKS:
        return f"{chunks} chunks are more than {MAX_CHUNKS}"
    values = config.chunk // (32 * config.row_warps)
    return None if values <= 32 else f"{values} values a thread do not fit its registers"


SAMPLE = Tunable("sample", SampleConfig, _heuristic, _space, _valid, _bucket)
