"""Launch configs of the two kernels that multiply by quantized weights on Hopper."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from flashkernel.core.device import Device
from flashkernel.core.tune import Tunable, ceil_div, power_of_2
from flashkernel.ops.gemm.configs import MAX_COUNTERS

TILE = 64
TOKENS = (8, 16, 32, 64, 128, 256)  # columns of wgmma
FEW_TOKENS = (8, 16, 32)  # columns of mma, in few_rows.cu
MAX_BLOCKS = {8: 7, 16: 4, 32: 1}  # by tokens: of a warp there, without spills at 128 registers; twice that at 255
MAX_STAGES = 12
MAX_FEW_ROWS = 5  # configs of few_rows.cu that a search times
_PITCH = 4 * (TILE + 4)
_WORTH_WHOLE = 0.65  # of the SMs busy: from there on a search also times tiles that are never cut


@dataclass(frozen=True)
class QuantizedConfig:
    """A launch of kernel.cu, or of few_rows.cu where it has `warps`.

    kernel.cu: a thread block computes `tokens` rows of y and 64 outputs for each of `warpgroups` warpgroups. A step of
    the sum is `blocks` times 64 columns; `stages` steps are loaded ahead. Where `stream_k` is False, tiles are never
    cut. `height` tiles of 64 outputs belong to a warpgroup.

    few_rows.cu: each of `warps` warps has `blocks` times 64 columns of the sum, which is divided among `slices` thread
    blocks; `stages` tiles of 16 outputs are loaded ahead.
    """

    tokens: int
    warpgroups: int
    blocks: int
    stages: int
    stream_k: bool = True
    warps: int = 0
    slices: int = 1
    height: int = 1

    def stage_bytes(self, bits: int, group: int, scale_bytes: int, zeros: bool) -> int:
        """Shared memory of a stage: x, tiles, scales and zeros, rounded up to the swizzle's 1 KB."""
        scales = max(1, self.blocks * TILE // group)
        weights = self.blocks * TILE * TILE * bits // 8 + scales * TILE * (scale_bytes + zeros)
        tall = self.warpgroups * self.height
        return ceil_div(self.blocks * self.tokens * TILE * 2 + tall * weights, 1024) * 1024

    def shared_bytes(self, stage: int) -> int:
        """Shared memory of a block: stages, barriers, flags, and the buffers that transpose the output."""
        ring = self.stages * (stage + 16) + 4 * self.warpgroups
        return ceil_div(ring, 16) * 16 + self.warpgroups * min(32, self.tokens) * _PITCH


def stage_bytes(config: QuantizedConfig, shape: Mapping[str, int]) -> int:
    """Shared memory of a stage for a call of such a shape."""
    return config.stage_bytes(shape["bits"], shape["group"], shape["scale_bytes"], bool(shape["zeros"]))


def _with_stages(
    tokens: int, warpgroups: int, blocks: int, device: Device, shape: Mapping[str, int], height: int = 1
) -> QuantizedConfig:
    limit = device.shared_per_block or 232448
    one = QuantizedConfig(tokens, warpgroups, blocks, 1, height=height)
    stage = stage_bytes(one, shape)
    stages = 1 + (limit - one.shared_bytes(stage)) // (stage + 16)
    return replace(one, stages=min(MAX_STAGES, stages))


def _few_rows_heuristic(device: Device, shape: Mapping[str, int]) -> QuantizedConfig | None:
    """A config of few_rows.cu, if it has one: 8 warps where a sum has several slices, and half the stages that fit."""
    found = few_rows_configs(device, shape, max(8, power_of_2(shape["rows"])))
    if not found:
        return None
    one = next((other for other in found if other.warps == 8 and found[0].slices == other.slices > 1), found[0])
    one = replace(one, stages=max(2, one.stages // 2) if one.stages > 3 else one.stages)
    return one if few_rows_error(one, device, shape) is None else None


def _heuristic(device: Device, shape: Mapping[str, int]) -> QuantizedConfig:
    rows = shape["rows"]
    if rows <= 8 or (rows <= 16 and shape["columns"] * shape["parts"] >= 128 * device.sms):
        few = _few_rows_heuristic(device, shape)
        if few is not None:
            return few
    blocks = 2 if shape["inner"] % (2 * TILE) == 0 else 1
    if rows <= 64:  # four warpgroups share x; for 8 bits and many rows they have no registers
        column_tiles = ceil_div(shape["columns"] * shape["parts"], 4 * TILE)
        warpgroups = 2 if rows > 32 and (shape["bits"] == 8 or 2 * column_tiles < device.sms) else 4
        if rows > 32 and (shape["zeros"] or shape["parts"] == 2):
            blocks = 1
        return _with_stages(max(8, power_of_2(rows)), warpgroups, blocks, device, shape)
    return _with_stages(128 if rows <= 128 else 256, 2, 1, device, shape)  # wide: weights are dequantized fewer times


def span(config: QuantizedConfig, group: int, inner: int) -> int:
    """Products of 16 columns in few_rows.cu whose sum is multiplied by one scale."""
    even = config.blocks % 2 == 0 and slice_units(config, inner) % 2 == 0
    return 2 if group == 32 else 8 if group == 2 * TILE and even else 4


def slice_units(config: QuantizedConfig, inner: int) -> int:
    """Units of 64 columns in a slice of the sum."""
    return ceil_div(inner // TILE, config.slices)


def few_rows_bytes(config: QuantizedConfig, shape: Mapping[str, int], experts: int = 0) -> int:
    """Shared memory of a block of few_rows.cu: the ring of copies, partial sums, flags and counts of experts."""
    threads, parts = 32 * config.warps, shape["parts"]
    spans = config.blocks * 4 // span(config, shape["group"], shape["inner"])
    scales = config.warps * spans * 16 * (shape["scale_bytes"] + shape["zeros"])
    slot = parts * (threads * config.blocks * 4 * shape["bits"] + scales)
    partial = 2 * config.warps * parts * config.tokens // 8 * 512
    factors = config.warps * (spans + 1) * config.tokens // 8 * 32
    return config.stages * slot + partial + factors + 4 * (config.warps // 4 + experts)


def _register_error(config: QuantizedConfig, shape: Mapping[str, int]) -> str | None:
    """Why x, or the scales that a warp copies at once, are too many for few_rows.cu; or None."""
    most = MAX_BLOCKS[config.tokens] * (2 if config.warps <= 8 else 1)
    if shape["zeros"] and shape["group"] == 32:
        most = max(1, most // 2)
    if config.blocks > most:
        return f"{config.blocks} blocks of {config.tokens} rows of x do not fit in a thread's registers"
    if config.blocks * 4 // span(config, shape["group"], shape["inner"]) * shape["scale_bytes"] > 32:
        return f"a warp's lanes copy 32 pieces of scales; {config.blocks} blocks have more"
    return None


def few_rows_configs(
    device: Device, shape: Mapping[str, int], tokens: int, max_slices: int = 6, experts: int = 0
) -> list[QuantizedConfig]:
    """Configs of few_rows.cu for so many rows at a time, those that leave the fewest warps without a share first."""
    limit, units = device.shared_per_block or 232448, shape["inner"] // TILE
    found = []
    for slices in range(1, min(max_slices, units) + 1):
        for warps in (16, 15, 14, 12, 8):
            blocks = ceil_div(ceil_div(units, slices), warps)
            one = QuantizedConfig(tokens, 0, blocks, 1, True, warps, slices)
            if device.sms % slices or _register_error(one, shape) is not None:
                continue
            first, second = (few_rows_bytes(replace(one, stages=stages), shape, experts) for stages in (1, 2))
            stages = min(MAX_STAGES, 1 + (limit - first) // (second - first))
            if stages >= 2:
                found.append(replace(one, stages=stages))
    return sorted(found, key=lambda one: (one.slices * one.warps * one.blocks, one.slices, -one.warps))


def _full_waves(config: QuantizedConfig, device: Device, shape: Mapping[str, int]) -> float:
    """The share of SMs that whole tiles keep busy."""
    outputs = TILE * config.warpgroups * config.height // shape["parts"]
    tiles = ceil_div(shape["rows"], config.tokens) * ceil_div(shape["columns"], outputs)
    return tiles / (ceil_div(tiles, device.sms) * device.sms)


def _space(device: Device, shape: Mapping[str, int]) -> Iterator[QuantizedConfig]:
    """Few, because each is compiled: 1 to 4 seconds."""
    least = max(8, power_of_2(min(shape["rows"], 256)))
    if least <= FEW_TOKENS[-1]:
        found = few_rows_configs(device, shape, least)
        yield from found[:MAX_FEW_ROWS]
        yield from (replace(one, stages=one.stages // 2) for one in found[:1] if one.stages > 3)
    for tokens in TOKENS:
        for warpgroups in (2, 4):
            for blocks in (1, 2):
                near = least // 2 <= tokens <= least and (tokens <= 64 or warpgroups == 2)
                if near and shape["inner"] % (blocks * TILE) == 0:
                    one = _with_stages(tokens, warpgroups, blocks, device, shape)
                    yield one
                    if _full_waves(one, device, shape) >= _WORTH_WHOLE:
                        yield replace(one, stream_k=False)
    if least >= 128 and shape["parts"] == 1:  # a third less of x and weights from L2 than 256 tokens by 128 outputs
        yield _with_stages(128, 2, 1, device, shape, height=2)


def _valid(config: QuantizedConfig, device: Device, shape: Mapping[str, int]) -> str | None:
    if config.warps:
        return few_rows_error(config, device, shape)
    if config.tokens not in TOKENS or config.warpgroups not in (2, 4) or config.blocks not in (1, 2):
        return f"{config} is no instance of the kernel"
    if config.tokens > 64 and config.warpgroups != 2:
        return "four warpgroups have no registers for more than 64 tokens"
    if config.height != 1 and (config.height != 2 or config.tokens != 128 or shape["parts"] != 1 or config.blocks != 1):
        return "two tiles of a warpgroup are for 128 tokens, steps of 64 columns and one matrix"
    if shape["inner"] % (config.blocks * TILE):
        return f"steps of {config.blocks * TILE} columns do not divide {shape['inner']}"
    if config.stages < 2:
        return "one stage leaves nothing to load ahead"
    if device.shared_per_block and config.shared_bytes(stage_bytes(config, shape)) > device.shared_per_block:
        return f"{config} needs more shared memory than a block has ({device.shared_per_block})"
    return None


def few_rows_error(config: QuantizedConfig, device: Device, shape: Mapping[str, int], experts: int = 0) -> str | None:
    """The reason why few_rows.cu cannot be launched so, or None."""
    if config.tokens not in FEW_TOKENS or not 4 <= config.warps <= 16 or config.slices < 1 or config.stages < 1:
        return f"{config} is no instance of few_rows.cu"
    reason = _register_error(config, shape)
    if reason is not None:
        return reason
    if slice_units(config, shape["inner"]) > config.warps * config.blocks:
        return f"{config.warps} warps of {config.blocks} blocks do not cover a slice of the sum"
    if config.slices > max(1, device.sms):
        return f"{config.slices} slices are more than SMs"
    shared = ceil_div(shape["columns"], 16) * ceil_div(shape["rows"], config.tokens) if config.slices > 1 else 0
    if shared > MAX_COUNTERS and not experts:  # products of experts have counters of their own beyond that
        return f"no more than {MAX_COUNTERS} tiles can be shared between blocks"
    if device.shared_per_block and few_rows_bytes(config, shape, experts) > device.shared_per_block:
        return f"{config} needs more shared memory than a block has ({device.shared_per_block})"
    return None


def _bucket(shape: Mapping[str, int]) -> tuple[int, ...]:
    rows = min(max(8, power_of_2(shape["rows"])), 1 << 14)
    names = ("columns", "inner", "bits", "group", "scale_bytes", "zeros", "parts")
    return (rows, *(shape[name] for name in names))


QUANTIZED = Tunable("linear_quantized", QuantizedConfig, _heuristic, _space, _valid, _bucket)
