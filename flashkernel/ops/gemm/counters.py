"""Counters that the blocks of a launch share where the sum of a tile is split among them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from flashkernel.ops.gemm.configs import MAX_COUNTERS

_STREAMS = 32  # rows of a table
_tables: dict[torch.device, list[Tensor]] = {}
_rows: dict[tuple[torch.device, int], Tensor] = {}  # by device and stream
_lock = threading.Lock()


def _zeros(where: torch.device) -> Tensor:
    table = torch.zeros((_STREAMS, MAX_COUNTERS), dtype=torch.int32, device=where)
    torch.cuda.current_stream(where).synchronize()  # once: other streams may be the next to use it
    return table


def counters(where: torch.device) -> Tensor:
    """Zeros that kernels count in and leave as zeros: a row for each stream, whose launches follow one another."""
    if where.type != "cuda":
        return torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=where)
    stream = torch.cuda.current_stream(where).cuda_stream
    row = _rows.get((where, stream))
    return _row(where, stream) if row is None else row


def _row(where: torch.device, stream: int) -> Tensor:
    """The row of a stream, which may be a new one."""
    with _lock:
        if (where, stream) in _rows:
            return _rows[where, stream]
        tables, taken = _tables.setdefault(where, []), sum(device == where for device, _ in _rows)
        if taken == _STREAMS * len(tables):
            if torch.cuda.is_current_stream_capturing():  # a graph's own are zeroed at every replay
                return torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=where)
            # While torch.compile warms a graph up, this thread allocates in the graph's memory, of which nothing may
            # stay.
            with ThreadPoolExecutor(1) as another:
                tables.append(another.submit(_zeros, where).result())
        row = _rows[where, stream] = tables[taken // _STREAMS][taken % _STREAMS]
        return row
