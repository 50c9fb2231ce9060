"""Launch configs of the append kernel."""

from __future__ import annotations

from collections.abc import Mapping

from flashkernel.core.head_configs import head_tunable, heads_per_program
from flashkernel.core.tune import power_of_2


def _elements(shape: Mapping[str, int], splits: int) -> int:
    """Elements of q, k and v that one program holds."""
    queries = heads_per_program(shape["q_heads"], splits) if shape["q_heads"] else 0
    return (queries + 2 * heads_per_program(shape["kv_heads"], splits)) * power_of_2(shape["dim"])


def _max_heads(shape: Mapping[str, int]) -> int:
    return max(shape["q_heads"], shape["kv_heads"])


def _bucket(shape: Mapping[str, int]) -> tuple[int, ...]:
    tokens = min(power_of_2(shape["tokens"]), 1 << 16)
    return (tokens, shape["q_heads"], shape["kv_heads"], shape["dim"], shape["bytes"], shape["quantized"])


def _bytes_per_thread(shape: Mapping[str, int]) -> int:
    return 64 if shape["quantized"] else 128  # dividing takes registers of its own


APPEND = head_tunable("append_kv", _elements, _max_heads, _bucket, _bytes_per_thread)
