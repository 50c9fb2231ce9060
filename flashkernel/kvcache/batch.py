"""The tensors of a step: where the batch's pages are, how long its sequences are, where its new tokens go.

They live at fixed addresses, as CUDA graphs want them. The host writes into pinned memory and one copy takes it over;
of the page table only the rows that changed since the last step are sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flashkernel.kvcache.cache import KVCache, Rows

ALIGNMENT = 16  # bytes


class Step(NamedTuple):
    """What the kernels take. The tensors are views: the next `fill` overwrites them."""

    page_table: Tensor  # int32 [batch, most_pages]
    lengths: Tensor  # int32 [batch], new tokens included
    slots: Tensor  # int64 [tokens]; -1 in padding
    positions: Tensor  # int32 [tokens]; 0 in padding
    cu_seqlens: Tensor  # int32 [batch + 1]: where each sequence's new tokens begin


class BatchTensors:
    """Buffers for steps of up to `most_sequences` sequences with `most_tokens` new tokens in all."""

    def __init__(
        self, cache: KVCache, most_sequences: int, most_tokens: int, device: torch.device | str = "cpu"
    ) -> None:
        self.cache, self.most_sequences, self.most_tokens = cache, most_sequences, most_tokens
        self.device = torch.device(device)
        fields = {  # name -> dtype, size
            "slots": (torch.int64, most_tokens),
            "changed": (torch.int64, most_sequences),
            "lengths": (torch.int32, most_sequences),
            "positions": (torch.int32, most_tokens),
            "cu_seqlens": (torch.int32, most_sequences + 1),
            "rows": (torch.int32, most_sequences * cache.most_pages),  # changed rows of the page table, packed
        }
        self._small = _offset(fields, "rows")  # bytes before the last field
        # Two host buffers in turn: one may still be on its way to the device while the other is written.
        self._hosts = [_Host(fields, self.device) for _ in range(2 if self.device.type == "cuda" else 1)]
        self._turn = 0
        table = torch.zeros((most_sequences, cache.most_pages), dtype=torch.int32, device=self.device)
        if self.device.type == "cuda":
            self._bytes = torch.zeros(_offset(fields, None), dtype=torch.uint8, device=self.device)
            self._views = _views(self._bytes, fields)
        else:
            self._bytes, self._views = self._hosts[0].bytes, self._hosts[0].tensors
            self._host_table = table.numpy()
        self._table = table
        self._numbers = np.arange(1, most_sequences + 1, dtype=np.int32)
        self._held = np.full(most_sequences, -1, dtype=np.int64)  # version of the page table in each row

    def fill(
        self, sequences: Rows, counts: int | Sequence[int] | np.ndarray = 1, *, pad: tuple[int, int] | None = None
    ) -> Step:
        """The step in which each sequence's last `counts` tokens, for which it has grown already, are new.

        `pad=(sequences, tokens)` gives tensors of that size: further sequences have no tokens, further tokens no slot.
        """
        rows = np.asarray(sequences, dtype=np.int64).reshape(-1)
        batch, cache = rows.size, self.cache
        each = counts if isinstance(counts, int) else np.asarray(counts, dtype=np.int32)
        total = batch * counts if isinstance(counts, int) else int(np.sum(each))
        padded, padded_tokens = pad or (batch, total)
        if not (batch <= padded <= self.most_sequences and total <= padded_tokens <= self.most_tokens):
            raise ValueError(
                f"kvcache: a step of {batch} sequences and {total} tokens, padded to {padded} and {padded_tokens}, "
                f"does not fit buffers for {self.most_sequences} and {self.most_tokens}"
            )
        host = self._hosts[self._turn]
        self._turn = (self._turn + 1) % len(self._hosts)
        host.wait()
        arrays = host.arrays
        lengths = cache.lengths[rows]
        arrays["lengths"][:batch] = lengths
        arrays["lengths"][batch:padded] = 0
        self._place_tokens(arrays, rows, lengths, each, total)
        arrays["slots"][total:padded_tokens] = -1
        arrays["positions"][total:padded_tokens] = 0
        arrays["cu_seqlens"][batch + 1 : padded + 1] = total
        self._send(host, rows)
        view = self._views
        return Step(
            self._table[:padded], view["lengths"][:padded], view["slots"][:padded_tokens],
            view["positions"][:padded_tokens], view["cu_seqlens"][: padded + 1],
        )  # fmt: skip

    def _place_tokens(
        self, arrays: dict[str, np.ndarray], rows: np.ndarray, lengths: np.ndarray, each: int | np.ndarray, total: int
    ) -> None:
        """Positions and slots of the new tokens, sequence after sequence."""
        ends = arrays["cu_seqlens"][1 : rows.size + 1]
        if isinstance(each, int):
            np.multiply(self._numbers[: rows.size], each, out=ends)
        else:
            np.cumsum(each, out=ends)
        if isinstance(each, int) and each == 1:
            place, row = lengths - 1, rows
        else:
            place = np.repeat(lengths - ends, each) + np.arange(total, dtype=np.int32)
            row = np.repeat(rows, each)
        if np.count_nonzero(place < 0):
            raise ValueError("kvcache: a sequence has fewer tokens than are said to be new; call grow first")
        size = self.cache.page_size
        column = place >> (size.bit_length() - 1)
        slots = arrays["slots"][:total]
        np.multiply(self.cache.page_table[row, column], size, out=slots, dtype=np.int64)
        slots += place & (size - 1)
        arrays["positions"][:total] = place

    def _send(self, host: _Host, rows: np.ndarray) -> None:
        """Take the host's fields to the device, and the page tables that the device does not have yet."""
        cache, batch = self.cache, rows.size
        versions = cache.versions[rows]
        changed = np.nonzero(self._held[:batch] != versions)[0]
        count = changed.size
        width = int(cache.page_counts[rows[changed]].max()) if count else 0
        if self.device.type != "cuda":
            if width:
                self._host_table[changed, :width] = cache.page_table[rows[changed], :width]
        else:
            if width:
                host.arrays["changed"][:count] = changed
                packed = host.arrays["rows"][: count * width].reshape(count, width)
                packed[:] = cache.page_table[rows[changed], :width]
            used = self._small + 4 * count * width
            self._bytes[:used].copy_(host.bytes[:used], non_blocking=True)
            if width:
                lines = self._views["rows"][: count * width].view(count, width)
                self._table[:, :width].index_copy_(0, self._views["changed"][:count], lines)
            host.sent()
        self._held[:batch] = versions


class _Host:
    """Fields in one piece of host memory, as arrays and as tensors; pinned where a GPU reads it."""

    def __init__(self, fields: dict[str, tuple[torch.dtype, int]], device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.bytes = torch.zeros(_offset(fields, None), dtype=torch.uint8, pin_memory=pinned)
        self.tensors = _views(self.bytes, fields)
        self.arrays = {name: tensor.numpy() for name, tensor in self.tensors.items()}
        self._device = device
        self._copied = torch.cuda.Event() if pinned else None

    def wait(self) -> None:
        """Until the device has read what was sent last."""
        if self._copied is not None:
            self._copied.synchronize()

    def sent(self) -> None:
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device))


def _offset(fields: dict[str, tuple[torch.dtype, int]], until: str | None) -> int:
    """Where a field begins in the bytes; without a name, where the last one ends."""
    offset = 0
    for name, (dtype, size) in fields.items():
        if name == until:
            break
        offset += -(-size * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return offset


def _views(data: Tensor, fields: dict[str, tuple[torch.dtype, int]]) -> dict[str, Tensor]:
    return {
        name: data[_offset(fields, name) :][: size * dtype.itemsize].view(dtype)
        for name, (dtype, size) in fields.items()
    }
