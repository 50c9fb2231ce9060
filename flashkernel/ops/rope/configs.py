"""Launch configs of the rope kernel."""

from __future__ import annotations

from collections.abc import Mapping

from flashkernel.blocks.heads import tile, tunable
from flashkernel.core.tune import power_of_2


def _elements(shape: Mapping[str, int], splits: int) -> int:
    heads = tile(shape["q_heads"], splits) + tile(shape["k_heads"], splits)
    return heads * power_of_2(shape["dim"])


def _bucket(shape: Mapping[str, int]) -> tuple[int, ...]:
    tokens = min(power_of_2(shape["tokens"]), 1 << 16)
    return (tokens, shape["q_heads"], shape["k_heads"], shape["dim"], shape["bytes"])


ROTATE = tunable("rope", _elements, lambda shape: shape["q_heads"], _bucket)
