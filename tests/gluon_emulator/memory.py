"""Shared memory, global memory and tensors in tiles, with the checks of their addresses."""

from __future__ import annotations

import threading
import types
from typing import Any

import torch
from torch import Tensor

from gluon_emulator.machine import this_machine
from gluon_emulator.values import as_value


def _marks(written: Tensor, data: Tensor) -> Tensor:
    """Which elements of a view are marked, in a tensor of marks as large as the view's storage."""
    return torch.as_strided(written, data.shape, data.stride(), data.storage_offset())


def mark_written(data: Tensor) -> None:
    """This thread wrote there through the generic proxy: WGMMA and TMA see it after the thread's next fence only."""
    storage = data.untyped_storage()
    unfenced, own = this_machine().unfenced, (threading.get_ident(), storage.data_ptr())
    for (_, address), written in unfenced.items():
        if address == storage.data_ptr():
            _marks(written, data).fill_(False)
    size = storage.nbytes() // data.element_size()
    _marks(unfenced.setdefault(own, torch.zeros(size, dtype=torch.bool)), data).fill_(True)


def fence_async_shared() -> None:
    """What this thread wrote is visible to the asynchronous proxy."""
    unfenced = this_machine().unfenced
    for place in [place for place in unfenced if place[0] == threading.get_ident()]:
        del unfenced[place]


def check_fenced(data: Tensor) -> None:
    """WGMMA or TMA reads or writes there."""
    for (_, address), written in this_machine().unfenced.items():
        if address == data.untyped_storage().data_ptr():
            assert not bool(_marks(written, data).any()), "WGMMA or TMA meets what was written without a fence"


class Shared:
    """A view of shared memory."""

    def __init__(self, data: Tensor) -> None:
        self.data = data
        self.dtype = data.dtype

    def index(self, place: Any) -> Shared:
        assert 0 <= int(place) < self.data.shape[0]
        return Shared(self.data[int(place)])

    def reshape(self, shape: Any) -> Shared:
        return Shared(self.data.view([int(size) for size in shape]))

    def permute(self, order: Any) -> Shared:
        return Shared(self.data.permute(*order))

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.data.narrow(dim, int(start), int(length)))

    def store(self, value: Tensor) -> None:
        assert tuple(value.shape) == tuple(self.data.shape)
        assert value.dtype == self.data.dtype
        self.data.copy_(value)
        mark_written(self.data)

    def load(self, layout: Any) -> Tensor:
        return self.data.clone()


class Boxes(Shared):
    """Tiles [stages, rows, columns] of 16-bit values as they lie in memory: 64 columns side by side, then the next 64.

    Cut into boxes of whole rows of those 64 columns, one behind the other.
    """

    def __init__(self, data: Tensor, shape: list[int]) -> None:
        super().__init__(data)
        assert data.element_size() == 2
        assert shape[-1] == 64
        assert data.shape[2] % 64 == 0
        self.shape = shape
        self.height = torch.empty(shape[1:], device="meta").numel() // 64
        assert self.height % 8 == 0, "a swizzle's pattern spans 8 rows"
        assert shape[0] * self.height * 64 == data.numel(), "another number of bytes"

    def index(self, place: Any) -> Shared:
        assert 0 <= int(place) < self.shape[0]
        rows, columns = self.data.shape[1:]
        pages, panels = rows // self.height, columns // 64
        stage, panel, page = int(place) // (panels * pages), int(place) // pages % panels, int(place) % pages
        found = self.data[stage, page * self.height : (page + 1) * self.height, panel * 64 : (panel + 1) * 64]
        return Shared(found if len(self.shape) == 3 else found.view(self.shape[1], self.shape[2], self.shape[3], 64))


class Joined(Shared):
    """Pairs of tiles [2 * stages, 1, rows, columns] that lie behind each other, read as one tile each."""

    def __init__(self, data: Tensor, shape: list[int]) -> None:
        super().__init__(data)
        self.dim = next(dim for dim in (1, 2) if shape[1 + dim] == 2 * data.shape[1 + dim])
        assert shape[4 - self.dim] == data.shape[4 - self.dim]
        # Columns are stored in panels of 128 bytes: tiles of whole panels lie side by side.
        assert self.dim == 1 or data.shape[3] * data.element_size() % 128 == 0

    def index(self, place: Any) -> Shared:
        return Shared(torch.cat([self.data[2 * int(place)], self.data[2 * int(place) + 1]], self.dim))


def reinterpret(memory: Shared, dtype: torch.dtype, shape: Any, layout: Any) -> Shared:
    assert dtype == memory.dtype
    sizes = [int(size) for size in shape]
    if len(sizes) == memory.data.ndim and 2 * sizes[0] == memory.data.shape[0]:
        return Joined(memory.data, sizes)
    return Boxes(memory.data, sizes)


class Pointer:
    def __init__(self, storage: Tensor, offset: Any = 0) -> None:
        self.storage, self.offset = storage, offset

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.storage, self.offset + other)

    __iadd__ = __add__

    @property
    def dtype(self) -> Any:
        return types.SimpleNamespace(element_ty=self.storage.dtype)

    def places(self, mask: Any) -> tuple[Tensor, Tensor]:
        offset = torch.as_tensor(self.offset)
        wanted = torch.ones_like(offset, dtype=torch.bool) if mask is None else torch.as_tensor(mask)
        offset, wanted = torch.broadcast_tensors(offset, wanted)
        inside = (offset >= 0) & (offset < self.storage.numel())
        assert bool((inside | ~wanted).all()), "an address outside its tensor"
        return torch.where(wanted, offset, 0), wanted


def load_global(pointer: Pointer, mask: Any = None, other: Any = 0, **_: Any) -> Tensor:
    offset, wanted = pointer.places(mask)
    if pointer.storage.numel() == 0:
        return as_value(torch.zeros(offset.shape, dtype=pointer.storage.dtype))
    found = pointer.storage[offset.long()]
    return as_value(torch.where(wanted, found, torch.as_tensor(other, dtype=found.dtype)))


def store_global(pointer: Pointer, value: Any, mask: Any = None) -> None:
    offset, wanted = pointer.places(mask)
    value = torch.as_tensor(value).expand(offset.shape)
    pointer.storage[offset[wanted].long()] = value[wanted].to(pointer.storage.dtype)


def atomic_add(pointer: Pointer, value: Any, mask: Any = None, **_: Any) -> Tensor:
    """Returns what was there. Programs run one after the other: what one waits for has happened, or never will."""
    offset, wanted = pointer.places(mask)
    before = pointer.storage[offset.long()].clone()
    added = torch.as_tensor(value, dtype=pointer.storage.dtype).expand(offset.shape)
    pointer.storage.index_add_(0, offset[wanted].long(), added[wanted])
    return as_value(before)


class Descriptor:
    """A tensor in tiles; reads outside it give zero, writes there are dropped."""

    def __init__(self, given: Any) -> None:
        base = given.base.detach()
        if max(given.shape) >= 1 << 30:  # larger than any tensor: addresses modulo 2^64
            size = base.untyped_storage().nbytes() // base.element_size()
            self.memory = torch.as_strided(base, (size,), (1,), 0)
            self.limits, self.strides, self.first = list(given.shape), list(given.strides), base.storage_offset()
        else:
            self.memory = None
            self.view = torch.as_strided(base, given.shape, given.strides, base.storage_offset())
        self.block = self.block_shape = [int(size) for size in given.block_shape]
        self.dtype = given.base.dtype
        self.layout = None
        size = torch.empty(self.block, device="meta").numel() * given.base.element_size()
        self.block_type = types.SimpleNamespace(nbytes=size)

    def _parts(self, place: list[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        outer, inner = [], []
        for start, length, size in zip(place, self.block, self.view.shape):
            low, high = min(max(start, 0), size), min(max(start + length, 0), size)
            outer.append(slice(low, max(low, high)))
            inner.append(slice(low - start, max(low, high) - start))
        return tuple(outer), tuple(inner)

    def _addresses(self, place: list[int]) -> tuple[Tensor, Tensor]:
        """For each element of a tile: whether its coordinates lie inside the dims, and its place in memory if so."""
        inside, address = torch.ones(self.block, dtype=torch.bool), torch.full(self.block, self.first)
        for dim, (start, length) in enumerate(zip(place, self.block)):
            coordinate = torch.arange(start, start + length).view(
                [-1 if dim == one else 1 for one in range(len(place))]
            )
            inside &= (coordinate >= 0) & (coordinate < self.limits[dim])
            address += coordinate * self.strides[dim]  # int64 wraps
        assert self.memory is not None
        within = (address >= 0) & (address < self.memory.numel())
        assert bool((within | ~inside).all()), "an address outside its tensor"
        return inside, torch.where(inside, address, 0)

    def read(self, place: list[int]) -> Tensor:
        if self.memory is not None:
            inside, address = self._addresses(place)
            return torch.where(inside, self.memory[address].float(), 0).to(self.dtype)
        tile = torch.zeros(self.block, dtype=self.dtype)
        outer, inner = self._parts(place)
        tile[inner] = self.view[outer]
        return tile

    def write(self, place: list[int], tile: Tensor) -> None:
        if self.memory is not None:
            inside, address = self._addresses(place)
            self.memory[address[inside]] = tile.view(self.block)[inside]
            return
        outer, inner = self._parts(place)
        self.view[outer] = tile.view(self.block)[inner]
