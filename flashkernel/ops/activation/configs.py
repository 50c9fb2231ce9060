"""Launch configs of the activation kernels: elements and warps per program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from flashkernel.core.device import Device
from flashkernel.core.tune import Tunable, power_of_2

_MANY = 1 << 24  # elements beyond which a launch fills any GPU many times over
FEW = 1 << 20  # elements up to which all that a launch reads is on its way at the same time


@dataclass(frozen=True)
class BlockConfig:
    """A run of consecutive elements."""

    elements: int
    num_warps: int


def _bucket(shape: Mapping[str, int]) -> tuple[int, ...]:
    return (power_of_2(shape["rows"]), min(power_of_2(shape["width"]), _MANY), shape["bytes"], shape["loads"])


def _heuristic(device: Device, shape: Mapping[str, int]) -> BlockConfig:
    vector = 16 // shape["bytes"]  # elements of one 16-byte access
    if shape["rows"] * shape["width"] <= FEW and shape["width"] >= 512:
        return BlockConfig(512, 4)  # over at once: what counts is how soon a thread is done, so 4 values each
    # At least 32 bytes asked for per thread: with full occupancy, 64 KB in flight on each multiprocessor.
    elements = 128 * vector * (2 if shape["loads"] == 1 else 1)
    elements = min(elements, power_of_2(shape["width"]))
    while elements > 32 * vector and shape["rows"] * (shape["width"] // elements) < 2 * device.sms:
        elements //= 2  # few elements: spread them over the multiprocessors
    return BlockConfig(elements, max(1, min(4, elements // (32 * vector))))


def _space(device: Device, shape: Mapping[str, int]) -> Iterator[BlockConfig]:
    for elements in (256, 512, 1024, 2048, 4096):
        for num_warps in (1, 2, 4, 8):
            yield BlockConfig(elements, num_warps)


def _valid(config: BlockConfig, device: Device, shape: Mapping[str, int]) -> str | None:
    each = config.elements / (32 * config.num_warps)
    return None if each <= 64 else f"{each:.0f} values a thread do not fit its registers"


FORWARD = Tunable("activation_forward", BlockConfig, _heuristic, _space, _valid, _bucket)
BACKWARD = Tunable("activation_backward", BlockConfig, _heuristic, _space, _valid, _bucket)
