"""The memory of the pages: K and V of all layers that share page tables, and their scales."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flashkernel.core.device import half_dtype, properties

QUANTIZED = (torch.float8_e4m3fn, torch.int8)
DTYPES = (torch.bfloat16, torch.float16, torch.float32, *QUANTIZED)


class LayerPages(NamedTuple):
    """One layer's pages as the kernels take them; scales are None where the pages are not quantized.

    Args:
        k_pages: (pages, page_size, kv_heads, head_dim).
        v_pages: (pages, page_size, kv_heads, value_dim).
        k_scale: float32 (pages, page_size, kv_heads), or None.
        v_scale: as k_scale.

    Returns:
        A tuple, as `PageStorage.layers` holds it.

    Example:
        >>> from flashkernel.kvcache import PageStorage
        >>> layer = PageStorage(layers=1, pages=8, page_size=16, kv_heads=2, head_dim=64).layers[0]
        >>> layer.k_pages.shape, layer.k_scale
        (torch.Size([8, 16, 2, 64]), None)
    """

    k_pages: Tensor  # [pages, page_size, kv_heads, head_dim]
    v_pages: Tensor  # [pages, page_size, kv_heads, value_dim]
    k_scale: Tensor | None  # [pages, page_size, kv_heads], float32
    v_scale: Tensor | None


class PageStorage:
    """The K and V tensors of all layers, zero at first; page 0 stays zero.

    Args:
        layers: layers of the model that share page tables.
        pages: the number of pages, the empty page 0 included.
        page_size: tokens per page.
        kv_heads: KV heads per layer.
        head_dim: width of a key.
        value_dim: width of a value; None is head_dim.
        dtype: bfloat16, float16, float32, float8_e4m3fn or int8; the last two come with scales. None is bfloat16, or
            float16 on a GPU that has no bfloat16 (before sm_80).
        device: where the tensors are.

    Returns:
        The storage; `layers` has one `LayerPages` per layer.

    Example:
        >>> import torch
        >>> from flashkernel.kvcache import PageStorage
        >>> storage = PageStorage(2, 8, 16, kv_heads=2, head_dim=64, dtype=torch.int8)
        >>> storage.layers[1].v_scale.shape
        torch.Size([8, 16, 2])
    """

    def __init__(
        self,
        layers: int,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if dtype is None:
            dtype = half_dtype(properties(torch.device(device)))
        if dtype not in DTYPES:
            names = ", ".join(str(known).removeprefix("torch.") for known in DTYPES)
            raise ValueError(f"kvcache: keys and values cannot be kept in {dtype}; they can in {names}")
        self.pages, self.page_size, self.dtype = pages, page_size, dtype
        slots = (layers, pages, page_size, kv_heads)
        stored = torch.uint8 if dtype == torch.float8_e4m3fn else dtype  # torch fills bytes on every device
        self.k = torch.zeros((*slots, head_dim), dtype=stored, device=device).view(dtype)
        self.v = torch.zeros((*slots, value_dim or head_dim), dtype=stored, device=device).view(dtype)
        self.k_scale = torch.zeros(slots, device=device) if dtype in QUANTIZED else None
        self.v_scale = torch.zeros(slots, device=device) if dtype in QUANTIZED else None
        tensors = (self.k, self.v, self.k_scale, self.v_scale)
        self.layers = [LayerPages(*(None if x is None else x[layer] for x in tensors)) for layer in range(layers)]  # type: ignore[arg-type]
        self._words = [_as_words(x) for x in tensors if x is not None]

    @property
    def device(self) -> torch.device:
        return self.k.device

    @property
    def nbytes(self) -> int:
        """Bytes of all pages of all layers."""
        return sum(words.nbytes for words in self._words)

    def copy_pages(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copies the pages `sources` to `targets` on the device, in every layer; no target is a source.

        Args:
            sources: Page numbers.
            targets: Page numbers, as many.
        """
        both = torch.from_numpy(np.stack((sources, targets)).astype(np.int64)).to(self.device, non_blocking=True)
        for words in self._words:
            words.index_copy_(1, both[1], words.index_select(1, both[0]))


def bytes_per_page(
    layers: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype, value_dim: int | None = None
) -> int:
    """Bytes that one page takes in all layers."""
    head = (head_dim + (value_dim or head_dim)) * dtype.itemsize + (8 if dtype in QUANTIZED else 0)
    return layers * page_size * kv_heads * head


def _as_words(x: Tensor) -> Tensor:
    """x as [layers, pages, words of a page], in the widest integers that divide a page, which copies move."""
    flat = x.view(x.shape[0], x.shape[1], -1)
    size = flat.shape[2] * flat.element_size()
    word = next(kind for kind in (torch.int64, torch.int32, torch.int16, torch.uint8) if size % kind.itemsize == 0)
    return flat.view(torch.uint8).view(word)
