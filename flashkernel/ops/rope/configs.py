"""Launch configs of the rope kernel: how many programs share a token's heads, and their warps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from flashkernel.core.device import Device
from flashkernel.core.tune import Tunable, ceil_div, power_of_2


@dataclass(frozen=True)
class Heads:
    """A token's heads, dealt out to `splits` programs."""

    splits: int
    warps: int


def tile(heads: int, splits: int) -> int:
    """Heads in one program's tile."""
    return power_of_2(ceil_div(heads, splits))


def _elements(shape: Mapping[str, int], splits: int) -> int:
    heads = tile(shape["q_heads"], splits) + tile(shape["k_heads"], splits)
    return heads * power_of_2(shape["dim"])


def _bucket(shape: Mapping[str, int]) -> tuple[int, ...]:
    tokens = min(power_of_2(shape["tokens"]), 1 << 16)
    return (tokens, shape["q_heads"], shape["k_heads"], shape["dim"], shape["bytes"])


def _heuristic(device: Device, shape: Mapping[str, int]) -> Heads:
    splits = 1
    # A program holds its whole tile in registers; few tokens are spread over the multiprocessors.
    while splits < shape["q_heads"] and (
        _elements(shape, splits) > 8192
        or (shape["tokens"] * splits < 2 * device.sms and tile(shape["q_heads"], splits) > 4)
    ):
        splits *= 2
    warps = 1
    while warps < 16 and _elements(shape, splits) * shape["bytes"] >= 2 * warps * 32 * 128:
        warps *= 2  # 128 to 256 bytes a thread, all in flight at once
    return Heads(splits, warps)


def _space(device: Device, shape: Mapping[str, int]) -> Iterator[Heads]:
    for splits in (1, 2, 4, 8, 16, 32):
        for warps in (1, 2, 4, 8):
            yield Heads(splits, warps)


def _valid(config: Heads, device: Device, shape: Mapping[str, int]) -> str | None:
    if config.splits > 1 and config.splits >= 2 * shape["q_heads"]:
        return f"{shape['q_heads']} heads cannot be dealt out to {config.splits} programs"
    each = _elements(shape, config.splits) / (32 * config.warps)
    return None if each <= 128 else f"{each:.0f} values a thread do not fit its registers"


ROTATE = Tunable("rope", Heads, _heuristic, _space, _valid, _bucket)
