"""Launch configs of the routing kernels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from flashkernel.core.device import Device
from flashkernel.core.tune import Tunable, power_of_2

_TILE = 4096  # logits of a program
_ALONE = 8192  # as many, where one program then takes all tokens: one launch instead of three


@dataclass(frozen=True)
class RouteConfig:
    """Tokens and warps of a program, which has all experts' logits of its tokens in registers."""

    tokens: int
    num_warps: int


def _heuristic(device: Device, shape: Mapping[str, int]) -> RouteConfig:
    width, tokens = power_of_2(shape["experts"]), power_of_2(shape["tokens"])
    alone = tokens * width <= _ALONE
    block = tokens if alone else max(1, _TILE // width)
    return RouteConfig(block, max(1, min(8, block * width // 512)))


def _space(device: Device, shape: Mapping[str, int]) -> Iterator[RouteConfig]:
    width = power_of_2(shape["experts"])
    for tile in (1024, 2048, 4096, 8192, 16384):
        for warps in (1, 2, 4, 8):
            yield RouteConfig(max(1, tile // width), warps)


def _valid(config: RouteConfig, device: Device, shape: Mapping[str, int]) -> str | None:
    if config.tokens != power_of_2(config.tokens):
        return f"{config.tokens} tokens; a tile has a power of two of them"
    each = config.tokens * power_of_2(shape["experts"]) // (32 * config.num_warps)
    return None if each <= 128 else f"{each} logits per thread do not fit its registers"


def _bucket(shape: Mapping[str, int]) -> tuple[int, ...]:
    return power_of_2(shape["tokens"]), power_of_2(shape["experts"])


ROUTE = Tunable("moe_route", RouteConfig, _heuristic, _space, _valid, _bucket)
