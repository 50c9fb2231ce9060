"""Tables that kernels read at every call: made once for each key, and kept where a CUDA graph may read them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch

Entry = TypeVar("Entry")

_kept_alive: dict[int, Any] = {}


def capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def keep_alive(*objects: Any) -> None:
    """Keep tensors, or objects that hold tensors, for the life of the process.

    A CUDA graph holds addresses, and nothing tells when it is deleted: what a kernel reads during a capture and the
    caller does not own must be kept alive.
    """
    for one in objects:
        _kept_alive[id(one)] = one


@contextmanager
def for_any_call() -> Iterator[None]:
    """Makes tensors that are kept for later calls: those made inside `torch.inference_mode` could not be saved for a
    backward pass."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class DeviceTables(Generic[Entry]):
    """An LRU cache of tensors on devices, or of objects that hold tensors.

    At most `max_entries` are kept. An entry that is used while a CUDA graph is captured lives as long as the process.
    """

    def __init__(self, max_entries: int = 256) -> None:
        self.max_entries = max_entries
        self._entries: OrderedDict[Hashable, Entry] = OrderedDict()
        self._lock = threading.Lock()  # of the entries, not of making them

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable, device: torch.device, make: Callable[[], Entry]) -> Entry:
        """The entry of `key`, which includes the device; `make` makes it where there is none."""
        captured = device.type == "cuda" and capturing()
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
        if entry is None:
            if captured:
                raise RuntimeError(
                    "a call of this shape is made for the first time while a CUDA graph is captured, which cannot "
                    "record how its tables are made; run the call once before the capture"
                )
            entry = _made(make, device)
            with self._lock:
                self._entries[key] = entry
                if len(self._entries) > self.max_entries:
                    self._entries.popitem(last=False)
        if captured:
            keep_alive(entry)
        return entry


def _made(make: Callable[[], Entry], device: torch.device) -> Entry:
    """The new entry, complete for all streams.

    On a GPU it is made in another thread: while torch.compile warms up a CUDA graph, this thread allocates from the
    graph's memory pool, which is reused.
    """
    if device.type != "cuda":
        with for_any_call():
            return make()

    def complete() -> Entry:
        with torch.cuda.device(device):
            entry = make()
            torch.cuda.current_stream().synchronize()
        return entry

    with ThreadPoolExecutor(1) as another:
        return another.submit(complete).result()
