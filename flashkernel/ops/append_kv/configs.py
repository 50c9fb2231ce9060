"""Launch configs of the append kernel."""

from __future__ import annotations

from collections.abc import Mapping

from flashkernel.blocks.heads import tile, tunable
from flashkernel.core.tune import power_of_2


def _elements(shape: Mapping[str, int], splits: int) -> int:
    """What one program holds of q, k and v, the last two of as many heads."""
    queries = tile(shape["q_heads"], splits) if shape["q_heads"] else 0
    return (queries + 2 * tile(shape["kv_heads"], splits)) * power_of_2(shape["dim"])


def _most(shape: Mapping[str, int]) -> int:
    return max(shape["q_heads"], shape["kv_heads"])


def _bucket(shape: Mapping[str, int]) -> tuple[int, ...]:
    tokens = min(power_of_2(shape["tokens"]), 1 << 16)
    return (tokens, shape["q_heads"], shape["kv_heads"], shape["dim"], shape["bytes"], shape["quantised"])


def _each(shape: Mapping[str, int]) -> int:
    return 64 if shape["quantised"] else 128  # dividing takes registers of its own


APPEND = tunable("append_kv", _elements, _most, _bucket, _each)
