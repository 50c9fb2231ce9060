"""Launch configs of the quantization kernels: groups or rows per program, and warps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from flashkernel.core.device import Device
from flashkernel.core.tune import Tunable, power_of_2

MAX_WIDTH = 16384  # a whole row lives in registers
FEW = 1 << 20  # elements up to which what counts is how soon a program is done


@dataclass(frozen=True)
class TileConfig:
    """A tile of whole groups: rows, or parts of rows that share a scale."""

    groups: int
    num_warps: int


def _bucket(shape: Mapping[str, int]) -> tuple[int, ...]:
    return (power_of_2(shape["groups"]), power_of_2(shape["columns"]), shape["bytes"], shape["loads"])


def _heuristic(device: Device, shape: Mapping[str, int]) -> TileConfig:
    """About 16 values of each input a thread, which are two 16-byte loads in half precision; 8 for small launches."""
    block, count = power_of_2(shape["columns"]), power_of_2(shape["groups"])
    small = count * block <= FEW
    elements = 1024 if small else 4096
    groups = max(1, min(elements // block, count))
    values = 8 if small else 32 if block >= 8192 else 16  # of a thread
    return TileConfig(groups, max(1, min(16, groups * block // (32 * values))))


def _space(device: Device, shape: Mapping[str, int]) -> Iterator[TileConfig]:
    for groups in (1, 2, 4, 8, 16, 32, 64):
        for num_warps in (1, 2, 4, 8, 16):
            yield TileConfig(groups, num_warps)


def _valid(config: TileConfig, device: Device, shape: Mapping[str, int]) -> str | None:
    each = config.groups * power_of_2(shape["columns"]) / (32 * config.num_warps) * min(shape["loads"], 2)
    return None if each <= 128 else f"{each:.0f} values a thread do not fit its registers"


QUANTIZE = Tunable("quantize_groups", TileConfig, _heuristic, _space, _valid, _bucket)
DEQUANTIZE = Tunable("dequantize_groups", TileConfig, _heuristic, _space, _valid, _bucket)
NORM = Tunable("rms_norm_quantize", TileConfig, _heuristic, _space, _valid, _bucket)
