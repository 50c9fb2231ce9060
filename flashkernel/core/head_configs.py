"""Launch configs of kernels whose programs each take a token, or some of its heads (rope, append_kv)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from flashkernel.core.device import Device
from flashkernel.core.tune import Tunable, ceil_div, power_of_2

Shape = Mapping[str, int]
MAX_ELEMENTS = 8192  # that a program holds in registers


@dataclass(frozen=True)
class HeadSplit:
    """The heads of a token are divided among `splits` programs of `num_warps` warps."""

    splits: int
    num_warps: int


def heads_per_program(heads: int, splits: int) -> int:
    """Heads in one program's tile: a power of two, at least heads / splits."""
    return power_of_2(ceil_div(heads, splits))


def head_tunable(
    name: str,
    elements: Callable[[Shape, int], int],
    heads: Callable[[Shape], int],
    bucket: Callable[[Shape], tuple[int, ...]],
    bytes_per_thread: Callable[[Shape], int] = lambda shape: 128,
) -> Tunable:
    """The launch choices of a kernel that takes a token's heads. Shapes have "tokens" and "bytes" (of an element).

    Args:
        name: The tunable's name.
        elements: Given (shape, splits): elements that one program holds in registers.
        heads: Given the shape: heads to divide.
        bucket: Given the shape: the key of shapes that share a config.
        bytes_per_thread: Given the shape: bytes that a thread loads at once; warps are added while there are more.
    """

    def heuristic(device: Device, shape: Shape) -> HeadSplit:
        splits = 1
        # A program holds its whole tile in registers; the heads of few tokens are spread over the SMs.
        while splits < heads(shape) and (
            elements(shape, splits) > MAX_ELEMENTS
            or (shape["tokens"] * splits < 2 * device.sms and heads_per_program(heads(shape), splits) > 4)
        ):
            splits *= 2
        bytes_held, num_warps = elements(shape, splits) * shape["bytes"], 1
        while num_warps < 16 and bytes_held >= 2 * num_warps * 32 * bytes_per_thread(shape):
            num_warps *= 2
        return HeadSplit(splits, num_warps)

    def valid(config: HeadSplit, device: Device, shape: Shape) -> str | None:
        if config.splits > 1 and config.splits >= 2 * heads(shape):
            return f"{heads(shape)} heads cannot be divided among {config.splits} programs"
        per_thread = elements(shape, config.splits) / (32 * config.num_warps)
        return None if per_thread <= 128 else f"{per_thread:.0f} values per thread do not fit its registers"

    return Tunable(name, HeadSplit, heuristic, _space, valid, bucket)


def _space(device: Device, shape: Shape) -> Iterator[HeadSplit]:
    for splits in (1, 2, 4, 8, 16, 32):
        for num_warps in (1, 2, 4, 8):
            yield HeadSplit(splits, num_warps)
