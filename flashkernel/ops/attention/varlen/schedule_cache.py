"""The tile schedules of the last steps: all layers of a step, and both directions, share one.

A schedule is found by the tensors of cumulative lengths themselves, the number of writes that torch counted on them
(their version), and everything else it depends on. An entry keeps its tensors alive, so that another tensor never has
their identity. Inside a CUDA graph's capture the schedule is always made: its launch becomes part of the graph, which
may be replayed with other lengths. torch.compile traces the operator, and merges equal calls in a graph. A write that
torch does not count, by a kernel outside of torch or a CUDA graph that was captured elsewhere, is not seen: pass such
lengths as a new tensor.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from flashkernel.core import device as devices
from flashkernel.core import tune
from flashkernel.core.library import traced
from flashkernel.core.tables import capturing
from flashkernel.ops.attention.varlen import library

MAX_SCHEDULES = 16
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)
_schedules: OrderedDict[tuple[Any, ...], tuple[Tensor, Tensor, Tensor]] = OrderedDict()


def shared_schedule(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *settings: Any) -> Tensor:
    """The schedule of packed sequences (`library.schedule`), made now unless an earlier call made it."""
    if not _cacheable(cu_seqlens_q) or not _cacheable(cu_seqlens_k) or capturing():
        return library.schedule(cu_seqlens_q, cu_seqlens_k, *settings)
    index = cu_seqlens_q.get_device()
    key = (
        id(cu_seqlens_q), cu_seqlens_q._version, id(cu_seqlens_k), cu_seqlens_k._version, tune.generation,
        tune.overridden(), _current_stream(index) if index >= 0 else 0, *settings,
        devices.properties(cu_seqlens_q.device) if devices.pretending() else None,
    )  # fmt: skip
    found = _schedules.get(key)
    if found is None:
        schedule = library.schedule(cu_seqlens_q, cu_seqlens_k, *settings)
        found = _schedules[key] = schedule, cu_seqlens_q, cu_seqlens_k
        if len(_schedules) > MAX_SCHEDULES:
            _schedules.popitem(last=False)
    return found[0]


def _cacheable(lengths: Tensor) -> bool:
    return not (traced(lengths) or lengths.is_inference() or lengths.is_meta)
