"""Launch configs of the experts' kernels for few tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from flashkernel.core.device import Device
from flashkernel.core.tune import Tunable, ceil_div, power_of_2

FEW_TOKENS = 64  # up to so many tokens, an expert's rows fit one tile and its weights are read once


@dataclass(frozen=True)
class FewTokensConfig:
    """Columns of the result and of the weight at a time, pipeline stages, warps, and parts of the summed dim.

    With a gate, a column of the result takes two rows of the weight.
    """

    block_n: int
    block_k: int
    num_stages: int
    num_warps: int
    splits: int = 1


def _heuristic(device: Device, shape: Mapping[str, int]) -> FewTokensConfig:
    """Tiles so small that all SMs have several programs: bytes in flight hide the latency of memory."""
    if device.kind == "cpu":
        return FewTokensConfig(16, 32, 1, 4, 2 if shape["splittable"] else 1)
    active, wide = min(shape["experts"], shape["rows"]), shape["block_m"] > 16
    block_n = 16
    for rows in (64, 32):  # of the weight: with a gate, half of them are columns of the result
        block_n = max(16, rows // 2 if shape["gated"] else rows)
        if active * ceil_div(shape["n"], block_n) >= 6 * device.sms:
            break
    splits = 1
    if shape["splittable"]:
        while splits < 8 and active * ceil_div(shape["n"], block_n) * splits < 6 * device.sms:
            splits *= 2
    block_k = 64 if shape["k"] % 128 else 128
    if wide:  # the rows of x weigh as much as a narrow tile of the weight
        block_n = 32 if shape["gated"] else 64
    if shape["bits"] == 4:  # a stage has a quarter of the bytes: more of them hide the same latency
        return FewTokensConfig(block_n, 128, 8, 4, splits)
    return FewTokensConfig(block_n, block_k, 4, 4, splits)


def _space(device: Device, shape: Mapping[str, int]) -> Iterator[FewTokensConfig]:
    for block_n in (16, 32, 64, 128):
        for block_k in (64, 128, 256):
            for stages in (2, 3, 4, 5):
                for warps in (2, 4, 8):
                    for splits in (1, 2, 4) if shape["splittable"] else (1,):
                        yield FewTokensConfig(block_n, block_k, stages, warps, splits)


def _valid(config: FewTokensConfig, device: Device, shape: Mapping[str, int]) -> str | None:
    for name in ("block_n", "block_k"):
        size = getattr(config, name)
        if size < 16 or size != power_of_2(size):
            return f"{name} is {size}; tensor cores take powers of two of at least 16"
    if shape["bits"] == 4 and config.block_k < 32:
        return f"block_k is {config.block_k}; a scale of MXFP4 is for 32 columns"
    if config.splits > 1 and not shape["splittable"]:
        return f"{config.splits} splits; the sum goes into an activation"
    tall = config.block_n * (2 if shape["gated"] else 1)
    tile = (tall * shape["bits"] // 8 + shape["block_m"] * 2) * config.block_k
    if device.shared_per_block and tile * max(1, config.num_stages - 1) > device.shared_per_block:
        return f"{config} needs {tile * (config.num_stages - 1)} bytes of shared memory"
    return None


def _bucket(shape: Mapping[str, int]) -> tuple[int, ...]:
    names = ("experts", "n", "k", "bits", "gated", "splittable", "block_m")
    return (power_of_2(shape["rows"]), *(shape[name] for name in names))


FEW = Tunable("moe_few_tokens", FewTokensConfig, _heuristic, _space, _valid, _bucket)
