"""Launch configs of kernels that take a token's heads: how many programs share them, and their warps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from flashkernel.core.device import Device
from flashkernel.core.tune import Tunable, ceil_div, power_of_2

Shape = Mapping[str, int]
MOST_VALUES = 8192  # that a program holds in registers


@dataclass(frozen=True)
class Heads:
    """A token's heads, dealt out to `splits` programs."""

    splits: int
    warps: int


def tile(heads: int, splits: int) -> int:
    """Heads in one program's tile."""
    return power_of_2(ceil_div(heads, splits))


def tunable(
    name: str,
    elements: Callable[[Shape, int], int],
    most: Callable[[Shape], int],
    bucket: Callable[[Shape], tuple[int, ...]],
    each: Callable[[Shape], int] = lambda shape: 128,
) -> Tunable:
    """`elements(shape, splits)` is what a program holds, `most(shape)` the heads to deal out, `each(shape)` the bytes
    that a thread asks for at once, at least."""

    def heuristic(device: Device, shape: Shape) -> Heads:
        splits = 1
        # A program holds its whole tile in registers; few tokens are spread over the multiprocessors.
        while splits < most(shape) and (
            elements(shape, splits) > MOST_VALUES
            or (shape["tokens"] * splits < 2 * device.sms and tile(most(shape), splits) > 4)
        ):
            splits *= 2
        warps = 1
        while warps < 16 and elements(shape, splits) * shape["bytes"] >= 2 * warps * 32 * each(shape):
            warps *= 2
        return Heads(splits, warps)

    def valid(config: Heads, device: Device, shape: Shape) -> str | None:
        if config.splits > 1 and config.splits >= 2 * most(shape):
            return f"{most(shape)} heads cannot be dealt out to {config.splits} programs"
        held = elements(shape, config.splits) / (32 * config.warps)
        return None if held <= 128 else f"{held:.0f} values a thread do not fit its registers"

    return Tunable(name, Heads, heuristic, _space, valid, bucket)


def _space(device: Device, shape: Shape) -> Iterator[Heads]:
    for splits in (1, 2, 4, 8, 16, 32):
        for warps in (1, 2, 4, 8):
            yield Heads(splits, warps)
