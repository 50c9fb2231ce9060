"""Tensors that kernels read call after call: made once for each shape, and kept where a CUDA graph may read them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import torch

Entry = TypeVar("Entry")

_pinned: dict[int, Any] = {}


def capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def pin(*held: Any) -> None:
    """Keep tensors, or what holds them, for the life of the process.

    A CUDA graph holds addresses, and nothing tells when it is deleted: what a kernel reads during a capture and the
    caller does not own must be pinned.
    """
    for one in held:
        _pinned[id(one)] = one


class DeviceTables(Generic[Entry]):
    """A cache of tensors, or of objects that hold some, by the facts that they follow from.

    At most `most` entries are kept; the one whose last use is longest ago goes first. Entries that are used while the
    current stream is captured stay for ever.
    """

    def __init__(self, most: int = 256) -> None:
        self.most = most
        self._entries: OrderedDict[Hashable, Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable, device: torch.device, make: Callable[[], Entry]) -> Entry:
        """The entry of a key, which must name the device too; `make` makes it where there is none yet."""
        recorded = device.type == "cuda" and capturing()
        entry = self._entries.get(key)
        if entry is None:
            if recorded:
                raise RuntimeError(
                    "a call of this shape is made for the first time while a CUDA graph is captured, which cannot "
                    "record how its tables are made; run the call once before the capture"
                )
            entry = self._entries[key] = _made(make, device)
            if len(self._entries) > self.most:
                self._entries.popitem(last=False)
        else:
            self._entries.move_to_end(key)
        if recorded:
            pin(entry)
        return entry


def _made(make: Callable[[], Entry], device: torch.device) -> Entry:
    """On a GPU in another thread: while torch.compile warms a graph up, this one allocates in the graph's memory, of
    which nothing may stay. The entry is complete when it is handed out, whichever stream uses it first."""
    if device.type != "cuda":
        return make()

    def complete() -> Entry:
        with torch.cuda.device(device):
            entry = make()
            torch.cuda.current_stream().synchronize()
        return entry

    with ThreadPoolExecutor(1) as another:
        return another.submit(complete).result()
