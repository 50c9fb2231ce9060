"""Tensors that follow from other tensors alone: made once for each version of those, and shared by all calls.

The block ranges of a mask with tables follow from the tables; the tile schedule of packed sequences from the cumulative
lengths. All layers of a step, and both directions, use the same. `derived` finds them by the tensors they were made
from (or those that these are views of), the number of writes that torch counted on them (their version), where they
begin, their sizes, strides and dtypes, and a key. It keeps nobody's tensors alive.

They are made at every call where a kept result could be wrong: while a CUDA graph is captured, which must contain how
they are made, because it may be replayed with other values; in a compiled graph, whose memory may belong to a CUDA
graph; and from inference tensors, which count no writes. A write that torch does not count is not seen: by a kernel
outside of torch, by a collective of torch.distributed, by NumPy, through `.data`, or by a CUDA graph that was captured
elsewhere. Pass such values as a new tensor.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from flashkernel.core import launch
from flashkernel.core.library import traced
from flashkernel.core.replay import notify_derived
from flashkernel.core.tables import capturing, for_any_call
from flashkernel.core.tracing import in_compiled_graph

MAX_ENTRIES = 64
_lock = threading.Lock()
Make = Callable[..., tuple[Tensor, ...]]

_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)
_entries: OrderedDict[Hashable, tuple[tuple[Tensor, ...], list[weakref.ref[Tensor]]]] = OrderedDict()


def derived(key: Hashable, tensors: Sequence[Tensor], make: Make) -> tuple[Tensor, ...]:
    """`make(*tensors)`, or what an earlier call with this key and these tensors made.

    Args:
        key: All that the result depends on beside the tensors.
        tensors: At least one.
        make: Reads nothing but its arguments, and returns new tensors on their device.
    """
    if any(traced(x) for x in tensors):
        return make(*tensors)
    observer = launch.observer()
    if observer is None:
        results = _found(key, tensors, make)
        notify_derived(lambda *others: _found(key, others, make), tensors, results)
        return results
    # One step of a recorded call: what it does inside is done again only if it must be.
    with launch.unobserved(), observer.paused():
        results = _found(key, tensors, make)
    observer.on_derived(lambda *others: _found(key, others, make), tensors, results)
    return results


def _found(key: Hashable, tensors: Sequence[Tensor], make: Make) -> tuple[Tensor, ...]:
    if in_compiled_graph() or capturing() or launch.is_collecting():
        return make(*tensors)
    parts: list[Any] = [key]
    roots: list[Tensor] = []
    for x in tensors:
        if x.is_inference() or x.is_meta:
            return make(*tensors)
        base = x._base  # every view is a new tensor
        root = x if base is None else base
        roots.append(root)
        parts += (id(root), x._version, x.data_ptr(), x.shape, x.stride(), x.dtype)
    index = tensors[0].get_device()
    parts.append(_current_stream(index) if index >= 0 else -1)
    place = tuple(parts)
    with _lock:
        entry = _entries.get(place)
        if entry is not None and all(reference() is root for reference, root in zip(entry[1], roots)):
            _entries.move_to_end(place)
            return entry[0]
        for old in [old for old, (_, references) in _entries.items() if any(one() is None for one in references)]:
            del _entries[old]
    with for_any_call():
        results = make(*tensors)
    with _lock:
        _entries[place] = results, [weakref.ref(root) for root in roots]
        if len(_entries) > MAX_ENTRIES:
            _entries.popitem(last=False)
    return results
