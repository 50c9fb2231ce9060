"""Small inputs that the host fills for every step: one pinned buffer, one copy, fixed device addresses."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes


class InputBuffers:
    """Named vectors that are written as arrays on the host and read as tensors on the device.

    On a GPU there are two host buffers, used alternately: one may still be copied while the other is written.
    """

    def __init__(self, fields: Mapping[str, tuple[torch.dtype, int]], device: torch.device) -> None:
        self._offsets, end = {}, 0
        for name, (dtype, size) in fields.items():
            self._offsets[name] = end
            end += -(-size * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        self._last = list(fields)[-1]
        self._last_itemsize = fields[self._last][0].itemsize
        pinned = device.type == "cuda"
        self._hosts = [
            torch.zeros(end, dtype=torch.uint8, pin_memory=pinned, device="cpu") for _ in range(2 if pinned else 1)
        ]
        self._copied = [torch.cuda.Event() for _ in self._hosts] if pinned else []
        self._arrays = [
            {name: tensor.numpy() for name, tensor in self._views(host, fields).items()} for host in self._hosts
        ]
        on_host = device.type == "cpu"
        self._bytes = self._hosts[0] if on_host else torch.zeros(end, dtype=torch.uint8, device=device)
        self.tensors = self._views(self._bytes, fields)
        self._index = 0

    def next_arrays(self) -> dict[str, np.ndarray]:
        """Host arrays for the next step; they hold old values. Waits until their last copy is done."""
        self._index = (self._index + 1) % len(self._hosts)
        if self._copied:
            self._copied[self._index].synchronize()
        return self._arrays[self._index]

    def copy_to_device(self, last: int) -> dict[str, Tensor]:
        """Starts the copy of the host arrays; of the last field only its first `last` entries. Returns the tensors."""
        if self._copied:
            used = self._offsets[self._last] + last * self._last_itemsize
            self._bytes[:used].copy_(self._hosts[self._index][:used], non_blocking=True)
            self._copied[self._index].record()
        return self.tensors

    def _views(self, data: Tensor, fields: Mapping[str, tuple[torch.dtype, int]]) -> dict[str, Tensor]:
        return {
            name: data[self._offsets[name] :][: size * dtype.itemsize].view(dtype)
            for name, (dtype, size) in fields.items()
        }
