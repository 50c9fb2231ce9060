"""Counters that the blocks of a launch share where the sum of a tile is split among them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from flashkernel.ops.gemm.configs import MAX_COUNTERS

_SLOTS = 32
_tables: dict[torch.device, Tensor] = {}
_slots: dict[tuple[torch.device, int], int] = {}


def _zeros(where: torch.device) -> Tensor:
    table = torch.zeros((_SLOTS, MAX_COUNTERS), dtype=torch.int32, device=where)
    torch.cuda.current_stream(where).synchronize()  # once: other streams may be the next to use it
    return table


def counters(where: torch.device) -> Tensor:
    """Zeros that kernels count in and leave as zeros: a row for each stream, whose launches follow one another."""
    table = _tables.get(where)
    if table is None:
        if where.type != "cuda" or torch.cuda.is_current_stream_capturing():  # a graph's own are zeroed at every replay
            return torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=where)
        # While torch.compile warms a graph up, this thread allocates in the graph's memory, of which nothing may stay.
        with ThreadPoolExecutor(1) as another:
            table = _tables[where] = another.submit(_zeros, where).result()
    stream = torch.cuda.current_stream(where).cuda_stream
    return table[_slots.setdefault((where, stream), len(_slots) % _SLOTS)]
