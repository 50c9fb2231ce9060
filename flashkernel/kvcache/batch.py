"""The tensors of a step: the batch's page tables and sequence lengths, and the slots of its new tokens.

Their addresses are fixed, for CUDA graphs. The host writes into pinned memory, and one copy takes it to the device; of
the page table only rows that changed since the last step are copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flashkernel.kvcache.cache import KVCache, Rows

ALIGNMENT = 16  # bytes
DIVISOR = 16  # Triton compiles in whether a stride divides by it


class Step(NamedTuple):
    """The tensors of a step, as `append_kv`, `decode_attention` and `paged_attention` take them.

    They are views: the next `BatchTensors.fill` overwrites them.

    Args:
        page_table: int32 (batch, max_pages).
        lengths: int32 (batch,), new tokens included.
        slots: int64 (tokens,), where each new token goes; -1 in padding.
        positions: int32 (tokens,); 0 in padding.
        cu_seqlens: int32 (batch + 1,), where each sequence's new tokens begin.

    Returns:
        What `BatchTensors.fill` gives.

    Example:
        >>> from flashkernel.kvcache import BatchTensors, KVCache
        >>> cache = KVCache(8, 16, max_num_seqs=2, max_model_len=64)
        >>> row = cache.add()
        >>> cache.grow(row, 3)
        >>> step = BatchTensors(cache, max_num_seqs=2, max_num_batched_tokens=64).fill(row, 3)
        >>> step.positions.tolist(), step.lengths.tolist(), step.cu_seqlens.tolist()
        ([0, 1, 2], [3], [0, 3])
    """

    page_table: Tensor
    lengths: Tensor
    slots: Tensor
    positions: Tensor
    cu_seqlens: Tensor


class BatchTensors:
    """Buffers for the tensors of steps, at fixed addresses.

    Args:
        cache: the cache whose sequences the steps run.
        max_num_seqs: sequences of a step, at most.
        max_num_batched_tokens: new tokens of a step, of all sequences together, at most.
        device: where the tensors are.

    Returns:
        Buffers whose `fill` gives the `Step` of each batch.

    Example:
        >>> from flashkernel.kvcache import BatchTensors, KVCache
        >>> cache = KVCache(8, 16, max_num_seqs=4, max_model_len=64)
        >>> rows = [cache.add(), cache.add()]
        >>> cache.grow(rows)  # one new token for each sequence
        >>> step = BatchTensors(cache, max_num_seqs=4, max_num_batched_tokens=4).fill(rows, pad=(4, 4))
        >>> step.lengths.tolist(), step.slots.tolist()
        ([1, 1, 0, 0], [16, 32, -1, -1])
    """

    def __init__(
        self, cache: KVCache, max_num_seqs: int, max_num_batched_tokens: int, device: torch.device | str = "cpu"
    ) -> None:
        self.cache, self.max_num_seqs, self.max_num_batched_tokens = cache, max_num_seqs, max_num_batched_tokens
        self.device = torch.device(device)
        fields = {  # name -> dtype, size
            "slots": (torch.int64, max_num_batched_tokens),
            "changed": (torch.int64, max_num_seqs),
            "lengths": (torch.int32, max_num_seqs),
            "positions": (torch.int32, max_num_batched_tokens),
            "cu_seqlens": (torch.int32, max_num_seqs + 1),
            "rows": (torch.int32, max_num_seqs * cache.max_pages),  # changed rows of the page table, packed
        }
        self._small = _offset(fields, "rows")  # bytes before the last field
        # Two alternating host buffers: one may still be copied to the device while the other is written.
        self._hosts = [_Host(fields, self.device) for _ in range(2 if self.device.type == "cuda" else 1)]
        self._next_host = 0
        columns = -(-cache.max_pages // DIVISOR) * DIVISOR
        table = torch.zeros((max_num_seqs, columns), dtype=torch.int32, device=self.device)[:, : cache.max_pages]
        if self.device.type != "cpu":
            self._bytes = torch.zeros(_offset(fields, None), dtype=torch.uint8, device=self.device)
            self._views = _views(self._bytes, fields)
        else:
            self._bytes, self._views = self._hosts[0].bytes, self._hosts[0].tensors
            self._host_table = table.numpy()
        self._table = table
        self._numbers = np.arange(1, max_num_seqs + 1, dtype=np.int32)
        self._versions = np.full(max_num_seqs, -1, dtype=np.int64)  # version of the page table in each row

    def fill(
        self,
        sequences: Rows,
        counts: int | Sequence[int] | np.ndarray = 1,
        *,
        pad: tuple[int, int] | None = None,
        decodes: tuple[int, int] = (0, 0),
    ) -> Step:
        """The step in which the last `counts` tokens of each sequence are new; `cache.grow` comes first.

        Args:
            sequences: the batch, one sequence or several.
            counts: new tokens of each sequence, one number for all or one each.
            pad: (sequences, tokens), the tensors' sizes; padding sequences have no tokens, padding tokens no slot.
            decodes: (count, padded): the first `count` sequences have one new token each, and are padded to `padded`
                sequences of one token before the others follow. A padding sequence has length 0, its token no slot.

        Returns:
            The tensors of the step.
        """
        rows = np.asarray(sequences, dtype=np.int64).reshape(-1)
        if decodes[1] > decodes[0]:
            return self._fill_padded_decodes(rows, np.asarray(counts, dtype=np.int32), pad, decodes)
        batch, cache = rows.size, self.cache
        each = counts if isinstance(counts, int) else np.asarray(counts, dtype=np.int32)
        total = batch * counts if isinstance(counts, int) else int(np.sum(each))
        padded, padded_tokens = pad or (batch, total)
        self._check_room(batch, batch, total, padded, padded_tokens)
        host = self._free_host()
        arrays = host.arrays
        lengths = cache.lengths[rows]
        arrays["lengths"][:batch] = lengths
        arrays["lengths"][batch:padded] = 0
        self._fill_tokens(arrays, rows, lengths, each, total)
        arrays["slots"][total:padded_tokens] = -1
        arrays["positions"][total:padded_tokens] = 0
        arrays["cu_seqlens"][batch + 1 : padded + 1] = total
        self._copy_to_device(host, rows)
        return self._step(padded, padded_tokens)

    def _check_room(self, sequences: int, entries: int, tokens: int, padded: int, padded_tokens: int) -> None:
        """ValueError if a step of so many tokens, in `entries` rows of the buffers, does not fit."""
        if not (entries <= padded <= self.max_num_seqs and tokens <= padded_tokens <= self.max_num_batched_tokens):
            raise ValueError(
                f"kvcache: a step of {sequences} sequences and {tokens} tokens, padded to {padded} and "
                f"{padded_tokens}, does not fit buffers for {self.max_num_seqs} and {self.max_num_batched_tokens}"
            )

    def _free_host(self) -> _Host:
        """The next host buffers, which the device has read."""
        host = self._hosts[self._next_host]
        self._next_host = (self._next_host + 1) % len(self._hosts)
        host.wait()
        return host

    def _fill_padded_decodes(
        self, rows: np.ndarray, counts: np.ndarray, pad: tuple[int, int] | None, decodes: tuple[int, int]
    ) -> Step:
        """`fill` with padding between the decoding sequences and the others."""
        count, first = decodes  # the others' first sequence, and their first token
        others, each = rows[count:], np.broadcast_to(counts, rows.shape)[count:]
        total = first + int(each.sum())
        padded, padded_tokens = pad or (first + others.size, total)
        self._check_room(rows.size, first + others.size, total, padded, padded_tokens)
        host = self._free_host()
        arrays = host.arrays
        placed = np.full(first + others.size, -1, dtype=np.int64)
        placed[:count], placed[first:] = rows[:count], others
        self._fill_tokens(arrays, rows[:count], self.cache.lengths[rows[:count]], 1, count)
        arrays["slots"][count:first] = -1
        arrays["positions"][count:first] = 0
        moved = {
            "slots": arrays["slots"][first:], "positions": arrays["positions"][first:],
            "cu_seqlens": arrays["cu_seqlens"][first:],
        }  # fmt: skip
        lengths = self.cache.lengths[others]
        self._fill_tokens(moved, others, lengths, each, total - first)
        arrays["cu_seqlens"][: first + 1] = np.arange(first + 1, dtype=np.int32)
        arrays["cu_seqlens"][first + 1 : first + 1 + others.size] += first
        arrays["cu_seqlens"][first + 1 + others.size : padded + 1] = total
        arrays["slots"][total:padded_tokens] = -1
        arrays["positions"][total:padded_tokens] = 0
        arrays["lengths"][:count] = self.cache.lengths[rows[:count]]
        arrays["lengths"][count:first] = 0
        arrays["lengths"][first : first + others.size] = lengths
        arrays["lengths"][first + others.size : padded] = 0
        self._copy_to_device(host, placed)
        return self._step(padded, padded_tokens)

    def _step(self, padded: int, padded_tokens: int) -> Step:
        view = self._views
        return Step(
            self._table[:padded], view["lengths"][:padded], view["slots"][:padded_tokens],
            view["positions"][:padded_tokens], view["cu_seqlens"][: padded + 1],
        )  # fmt: skip

    def _fill_tokens(
        self, arrays: dict[str, np.ndarray], rows: np.ndarray, lengths: np.ndarray, each: int | np.ndarray, total: int
    ) -> None:
        """Positions and slots of the new tokens, sequence after sequence."""
        ends = arrays["cu_seqlens"][1 : rows.size + 1]
        if isinstance(each, int):
            np.multiply(self._numbers[: rows.size], each, out=ends)
        else:
            np.cumsum(each, out=ends)
        if isinstance(each, int) and each == 1:
            position, row = lengths - 1, rows
        else:
            position = np.repeat(lengths - ends, each) + np.arange(total, dtype=np.int32)
            row = np.repeat(rows, each)
        if np.count_nonzero(position < 0):
            raise ValueError("kvcache: a sequence has fewer tokens than are said to be new; call grow first")
        size = self.cache.page_size
        column = position >> (size.bit_length() - 1)
        slots = arrays["slots"][:total]
        np.multiply(self.cache.page_table[row, column], size, out=slots, dtype=np.int64)
        slots += position & (size - 1)
        arrays["positions"][:total] = position

    def _copy_to_device(self, host: _Host, rows: np.ndarray) -> None:
        """Copies the host's fields to the device, and the rows of the page table that have changed."""
        cache, batch = self.cache, rows.size
        versions = np.where(rows < 0, self._versions[:batch], cache.versions[rows])  # -1 is padding
        changed = np.nonzero(self._versions[:batch] != versions)[0]
        count = changed.size
        width = int(cache.page_counts[rows[changed]].max()) if count else 0
        if self.device.type == "cpu":
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
                packed_rows = self._views["rows"][: count * width].view(count, width)
                self._table[:, :width].index_copy_(0, self._views["changed"][:count], packed_rows)
            host.record_copy()
        self._versions[:batch] = versions


class _Host:
    """Fields in one host buffer, as arrays and as tensors; pinned where a GPU reads it."""

    def __init__(self, fields: dict[str, tuple[torch.dtype, int]], device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.bytes = torch.zeros(_offset(fields, None), dtype=torch.uint8, pin_memory=pinned, device="cpu")
        self.tensors = _views(self.bytes, fields)
        self.arrays = {name: tensor.numpy() for name, tensor in self.tensors.items()}
        self._device = device
        self._copied = torch.cuda.Event() if pinned else None

    def wait(self) -> None:
        """Waits until the last copy to the device is complete."""
        if self._copied is not None:
            self._copied.synchronize()

    def record_copy(self) -> None:
        """Notes that a copy to the device was issued."""
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device))


def _offset(fields: dict[str, tuple[torch.dtype, int]], until: str | None) -> int:
    """The byte offset of a field; without a name, of the end."""
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
