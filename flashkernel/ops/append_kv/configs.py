"""Launch configs of the append kernel: how many programs share a token's heads, and their warps."""

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
    """What one program holds of q, k and v, the last two of as many heads."""
    queries = tile(shape["q_heads"], splits) if shape["q_heads"] else 0
    return (queries + 2 * tile(shape["kv_heads"], splits)) * power_of_2(shape["dim"])


def _most(shape: Mapping[str, int]) -> int:
    return max(shape["q_heads"], shape["kv_heads"])


def _bucket(shape: Mapping[str, int]) -> tuple[int, ...]:
    tokens = min(power_of_2(shape["tokens"]), 1 << 16)
    return (tokens, shape["q_heads"], shape["kv_heads"], shape["dim"], shape["bytes"], shape["quantised"])


def _heuristic(device: Device, shape: Mapping[str, int]) -> Heads:
    splits = 1
    # A program holds its whole tile in registers; few tokens are spread over the multiprocessors.
    while splits < _most(shape) and (
        _elements(shape, splits) > 8192
        or (shape["tokens"] * splits < 2 * device.sms and tile(_most(shape), splits) > 4)
    ):
        splits *= 2
    warps = 1
    each = 64 if shape["quantised"] else 128  # bytes a thread: dividing takes registers of its own
    while warps < 16 and _elements(shape, splits) * shape["bytes"] >= 2 * warps * 32 * each:
        warps *= 2
    return Heads(splits, warps)


def _space(device: Device, shape: Mapping[str, int]) -> Iterator[Heads]:
    for splits in (1, 2, 4, 8, 16, 32):
        for warps in (1, 2, 4, 8):
            yield Heads(splits, warps)


def _valid(config: Heads, device: Device, shape: Mapping[str, int]) -> str | None:
    if config.splits > 1 and config.splits >= 2 * _most(shape):
        return f"{_most(shape)} heads cannot be dealt out to {config.splits} programs"
    each = _elements(shape, config.splits) / (32 * config.warps)
    return None if each <= 128 else f"{each:.0f} values a thread do not fit its registers"


APPEND = Tunable("append_kv", Heads, _heuristic, _space, _valid, _bucket)
