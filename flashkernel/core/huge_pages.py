"""Tensors on a CPU in huge pages, for weights that every token reads: fewer TLB misses than with pages of 4 KB."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

PAGE = 2 << 20
CHUNK_BYTES = 64 << 20  # of a mapping; physical pages are taken when they are written
_ALIGNMENT = 64  # of a tensor, in bytes


def available() -> bool:
    """Whether this system gives huge pages to a mapping that asks for them."""
    return hasattr(mmap, "MADV_HUGEPAGE")


class HugePages:
    """Copies tensors side by side into huge pages.

    A mapping lives as long as a tensor in it. Where the system has no huge pages, tensors stay where they are.

    Example:
        >>> import torch
        >>> x = torch.arange(6).view(2, 3)
        >>> HugePages().place(x)
        tensor([[0, 1, 2],
                [3, 4, 5]])
    """

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8, device="cpu")

    def place(self, tensor: Tensor) -> Tensor:
        """Returns a contiguous copy of a CPU tensor in huge pages."""
        size = tensor.numel() * tensor.element_size()
        if not available() or size == 0:
            return tensor
        if self._free.numel() < size:
            self._free = _mapped(max(CHUNK_BYTES, size))
        taken = self._free[:size].view(tensor.dtype).view(tensor.shape)
        self._free = self._free[-(-size // _ALIGNMENT) * _ALIGNMENT :]
        return taken.copy_(tensor)


def _mapped(size: int) -> Tensor:
    """At least `size` bytes that begin at a huge page."""
    mapping = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    bytes_ = torch.frombuffer(mapping, dtype=torch.uint8)
    return bytes_[-bytes_.data_ptr() % PAGE :]
