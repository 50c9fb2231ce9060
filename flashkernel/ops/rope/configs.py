"""Launch configs of the rope kernel."""

from __future__ import annotations

from collections.abc import Mapping

from flashkernel.core.head_configs import head_tunable, heads_per_program
from flashkernel.core.tune import power_of_2


def _elements(shape: Mapping[str, int], splits: int) -> int:
    heads = heads_per_program(shape["q_heads"], splits) + heads_per_program(shape["k_heads"], splits)
    return heads * power_of_2(shape["dim"])


def _bucket(shape: Mapping[str, int]) -> tuple[int, ...]:
    tokens = min(power_of_2(shape["tokens"]), 1 << 16)
    return (tokens, shape["q_heads"], shape["k_heads"], shape["dim"], shape["bytes"])


ROTATE = head_tunable("rope", _elements, lambda shape: shape["q_heads"], _bucket)
