"""The tile schedules of the last steps: all layers of a step, and both directions, share one (core/derived.py)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashkernel.core import device as devices
from flashkernel.core import tune
from flashkernel.core.derived import derived
from flashkernel.core.library import traced
from flashkernel.ops.attention.varlen import library


def shared_schedule(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *settings: Any) -> Tensor:
    """The schedule of packed sequences (`library.schedule`), made now unless an earlier call made it.

    torch.compile traces the operator, and merges equal calls in a graph.
    """
    if traced(cu_seqlens_q) or traced(cu_seqlens_k):
        return library.schedule(cu_seqlens_q, cu_seqlens_k, *settings)
    pretended = devices.properties(cu_seqlens_q.device) if devices.pretending() else None
    key = ("attention_varlen_schedule", tune.generation[0], tune.overridden(), pretended, settings)

    def make(of_queries: Tensor, of_keys: Tensor) -> tuple[Tensor]:
        return (library.schedule(of_queries, of_keys, *settings),)

    return derived(key, (cu_seqlens_q, cu_seqlens_k), make)[0]
