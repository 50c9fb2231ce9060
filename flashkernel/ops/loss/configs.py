"""Launch configs of the loss kernels, and how many rows of logits the fused linear form holds at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from flashkernel.core.device import Device
from flashkernel.core.tune import Tunable, power_of_2

CHUNK_BYTES = 560 * 10**6  # of logits: large enough for full-speed matrix products, far below all of them


@dataclass(frozen=True)
class ScanConfig:
    """One program scans a row of logits in blocks."""

    block: int
    num_warps: int
    num_stages: int = 1  # blocks in flight


def chunk_rows(rows: int, classes: int, element_bytes: int) -> int:
    """Rows of logits per chunk: a multiple of 256, so that the matrix products keep whole tiles."""
    fitting = CHUNK_BYTES // max(1, classes * element_bytes)
    return min(max(256, fitting // 256 * 256), max(1, rows))


def _scan(block: int, num_warps: int, num_stages: int = 1) -> Callable[[Device, Mapping[str, int]], ScanConfig]:
    """Measured on long rows; rows shorter than a block get a block of their size, and warps to match."""

    def heuristic(device: Device, shape: Mapping[str, int]) -> ScanConfig:
        fitting = min(block, power_of_2(shape["classes"]))
        return ScanConfig(fitting, max(1, min(num_warps, fitting // 128)), num_stages if fitting == block else 1)

    return heuristic


def _space(device: Device, shape: Mapping[str, int]) -> Iterator[ScanConfig]:
    for block in (1024, 2048, 4096, 8192, 16384, 32768):
        for num_warps in (4, 8, 16, 32):
            for num_stages in (1, 3):
                yield ScanConfig(block, num_warps, num_stages)


def _valid(config: ScanConfig, device: Device, shape: Mapping[str, int]) -> str | None:
    elements = config.block / (32 * config.num_warps)
    return None if elements <= 64 else f"{elements:.0f} values a thread do not fit its registers"


def _bucket(shape: Mapping[str, int]) -> tuple[int, ...]:
    return (power_of_2(shape["classes"]), shape["bytes"])


# A scan that only reads wants many small programs; one that reads its row again wants the row still in the L2 cache,
# hence few programs with large blocks.
FORWARD = Tunable("cross_entropy_forward", ScanConfig, _scan(2048, 4), _space, _valid, _bucket)
IN_PLACE = Tunable("cross_entropy_in_place", ScanConfig, _scan(16384, 16, 3), _space, _valid, _bucket)
BACKWARD = Tunable("cross_entropy_backward", ScanConfig, _scan(16384, 16), _space, _valid, _bucket)
