"""Launch configs of the kernel that multiplies by quantised weights on Hopper."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from flashkernel.core.device import Device
from flashkernel.core.tune import Tunable, ceil_div, power_of_2

TILE = 64
TOKENS = (8, 16, 32, 64, 128, 256)  # columns of wgmma
MOST_STAGES = 12
_PITCH = 4 * (TILE + 4)


@dataclass(frozen=True)
class QuantizedConfig:
    """A thread block computes `tokens` rows of y and 64 outputs for each of `warpgroups` warpgroups.

    A step of the sum is `blocks` times 64 columns; `stages` steps are loaded ahead. Where `stream_k` is False, tiles
    are never cut.
    """

    tokens: int
    warpgroups: int
    blocks: int
    stages: int
    stream_k: bool = True

    def stage_bytes(self, bits: int, group: int, scale_bytes: int, zeros: bool) -> int:
        """Shared memory of a stage: x, tiles, scales and zeros, rounded up to the swizzle's 1 KB."""
        scales = max(1, self.blocks * TILE // group)
        weights = self.blocks * TILE * TILE * bits // 8 + scales * TILE * (scale_bytes + zeros)
        return ceil_div(self.blocks * self.tokens * TILE * 2 + self.warpgroups * weights, 1024) * 1024

    def shared_bytes(self, stage: int) -> int:
        """Shared memory of a block: stages, barriers, flags, and the buffers that transpose the output."""
        ring = self.stages * (stage + 16) + 4 * self.warpgroups
        return ceil_div(ring, 16) * 16 + self.warpgroups * min(32, self.tokens) * _PITCH


def stage_bytes(config: QuantizedConfig, shape: Mapping[str, int]) -> int:
    """Shared memory of a stage for a call of such a shape."""
    return config.stage_bytes(shape["bits"], shape["group"], shape["scale_bytes"], bool(shape["zeros"]))


def _with_stages(
    tokens: int, warpgroups: int, blocks: int, device: Device, shape: Mapping[str, int]
) -> QuantizedConfig:
    limit = device.shared_per_block or 232448
    one = QuantizedConfig(tokens, warpgroups, blocks, 1)
    stage = stage_bytes(one, shape)
    stages = 1 + (limit - one.shared_bytes(stage)) // (stage + 16)
    return QuantizedConfig(tokens, warpgroups, blocks, min(MOST_STAGES, stages))


def _heuristic(device: Device, shape: Mapping[str, int]) -> QuantizedConfig:
    rows = shape["rows"]
    blocks = 2 if shape["inner"] % (2 * TILE) == 0 else 1
    if rows <= 64:  # four warpgroups share x; for 8 bits and many rows they have no registers
        column_tiles = ceil_div(shape["columns"] * shape["parts"], 4 * TILE)
        warpgroups = 2 if rows > 32 and (shape["bits"] == 8 or 2 * column_tiles < device.sms) else 4
        if rows > 32 and (shape["zeros"] or shape["parts"] == 2):
            blocks = 1
        return _with_stages(max(8, power_of_2(rows)), warpgroups, blocks, device, shape)
    return _with_stages(128 if rows <= 128 else 256, 2, 1, device, shape)  # wide: weights are dequantized fewer times


def _space(device: Device, shape: Mapping[str, int]) -> Iterator[QuantizedConfig]:
    least = max(8, power_of_2(min(shape["rows"], 256)))
    for tokens in TOKENS:
        for warpgroups in (2, 4):
            for blocks in (1, 2):
                if tokens <= least and (tokens <= 64 or warpgroups == 2) and shape["inner"] % (blocks * TILE) == 0:
                    yield _with_stages(tokens, warpgroups, blocks, device, shape)


def _valid(config: QuantizedConfig, device: Device, shape: Mapping[str, int]) -> str | None:
    if config.tokens not in TOKENS or config.warpgroups not in (2, 4) or config.blocks not in (1, 2):
        return f"{config} is no instance of the kernel"
    if config.tokens > 64 and config.warpgroups != 2:
        return "four warpgroups have no registers for more than 64 tokens"
    if shape["inner"] % (config.blocks * TILE):
        return f"steps of {config.blocks * TILE} columns do not divide {shape['inner']}"
    if config.stages < 2:
        return "one stage leaves nothing to load ahead"
    if device.shared_per_block and config.shared_bytes(stage_bytes(config, shape)) > device.shared_per_block:
        return f"{config} needs more shared memory than a block has ({device.shared_per_block})"
    return None


def _bucket(shape: Mapping[str, int]) -> tuple[int, ...]:
    rows = min(max(8, power_of_2(shape["rows"])), 1 << 14)
    return (rows, shape["columns"], shape["inner"], shape["bits"], shape["group"], shape["zeros"], shape["parts"])


QUANTIZED = Tunable("linear_quantized", QuantizedConfig, _heuristic, _space, _valid, _bucket)
