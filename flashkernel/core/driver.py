"""Kernel launches by the CUDA driver itself, through ctypes.

Triton and cuda-core take all arguments of a launch anew every time. A `PreparedLaunch` keeps them packed as the
driver wants them: to launch again, only the addresses of tensors are written. It needs no compiler, and of Triton only
the loaded kernel and the types of its parameters.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

_INVALID_CONTEXT = 201
_COOPERATIVE, _PROGRAMMATIC_STREAM_SERIALIZATION = 2, 6  # CUlaunchAttributeID
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64
_SIZES = {"P": 8, "M": _MAP_BYTES}  # pointer, tensor map; other formats are struct's


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("padding", ctypes.c_char * 4), ("value", ctypes.c_int * 16)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    ]


@dataclass(frozen=True)
class TensorMap:
    """A TMA descriptor of a tensor: the arguments of cuTensorMapEncodeTiled, innermost dim first."""

    base: Tensor
    dtype: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]  # bytes, from the second dim on
    box: tuple[int, ...]
    swizzle: int
    nan_fill: bool

    def encode(self, address: int) -> bytes:
        """The 128 bytes a kernel takes as its parameter."""
        rank = len(self.sizes)
        space = ctypes.create_string_buffer(_MAP_BYTES + _MAP_ALIGNMENT)
        start = -ctypes.addressof(space) % _MAP_ALIGNMENT
        wide, narrow = ctypes.c_uint64 * rank, ctypes.c_uint32 * rank
        check(
            "cuTensorMapEncodeTiled",
            library().cuTensorMapEncodeTiled(
                ctypes.c_void_p(ctypes.addressof(space) + start), ctypes.c_int(self.dtype), ctypes.c_uint32(rank),
                ctypes.c_void_p(address), wide(*self.sizes), wide(*self.strides, 0), narrow(*self.box),
                narrow(*[1] * rank), ctypes.c_int(0), ctypes.c_int(self.swizzle), ctypes.c_int(2),  # L2 lines of 128 B
                ctypes.c_int(1 if self.nan_fill else 0),
            ),
        )  # fmt: skip
        return space.raw[start : start + _MAP_BYTES]

    def address_place(self) -> int | None:
        """Where in the 128 bytes the address lies by itself, such that it can be overwritten there; None where it
        is not found."""
        one, other = 0x7F0123456780, 0x7A9876543210
        first, second = self.encode(one), self.encode(other)
        for place in range(0, _MAP_BYTES, 8):
            found = [struct.unpack_from("Q", encoded, place)[0] for encoded in (first, second)]
            if found == [one, other] and first[:place] + first[place + 8 :] == second[:place] + second[place + 8 :]:
                return place
        return None


@dataclass(frozen=True)
class Launched:
    """A launch that was made, with all it takes to make it again.

    `params` are the kernel's parameters in order: a format of struct's, "P" for a pointer (a Tensor, an address or
    None) or "M" for a TensorMap, with its value. `rerun` stands for all of this under Triton's interpreter: it takes
    the values of `params` and runs the kernel. `owner` keeps the code loaded.
    """

    name: str
    params: tuple[tuple[str, Any], ...]
    function: int = 0  # CUfunction
    grid: tuple[int, int, int] = (1, 1, 1)
    block: tuple[int, int, int] = (1, 1, 1)
    shared: int = 0
    programmatic: bool = False  # programmatic dependent launch
    cooperative: bool = False
    owner: Any = field(default=None, repr=False)
    rerun: Callable[[Sequence[Any]], None] | None = field(default=None, repr=False)

    def mismatch(self) -> str | None:
        """Why the parameters cannot be those of the loaded function, by their sizes; None where they can."""
        if self.function == 0:
            return None
        wanted = [_SIZES.get(kind) or struct.calcsize(kind) for kind, _ in self.params]
        found = parameter_sizes(self.function)
        if found is None or found == wanted:
            return None
        return f"{self.name} has parameters of {found} bytes where {wanted} were packed"


class PreparedLaunch:
    """A launch on one stream, packed. `pack(buffer, 0, *addresses)` writes the addresses of its `moving` parameters in
    order. Those of its tensor maps are written to `words[map_words[place]]`, or by `replace_address(maps[place],
    address)` for maps that do not hold them by themselves. `launch(config, function, params, None)` launches."""

    def __init__(self, launched: Launched, stream: int, moving: Sequence[int], addresses: dict[int, int]) -> None:
        """`moving` are the places of pointers that change; `addresses` has those of all other pointers and maps."""
        self.launched = launched  # keeps the code loaded
        total = 8 * len(moving) + sum(_MAP_BYTES for _ in launched.params) + _MAP_ALIGNMENT
        self._space = ctypes.create_string_buffer(total)
        start = -ctypes.addressof(self._space) % _MAP_ALIGNMENT
        self.buffer = (ctypes.c_char * ((total - start) // 8 * 8)).from_buffer(self._space, start)
        base = ctypes.addressof(self.buffer)
        self.pack = struct.Struct(f"{len(moving)}Q").pack_into
        self.words = memoryview(self.buffer).cast("B").cast("Q")
        self.maps: dict[int, ctypes.c_void_p] = {}
        self.map_words: dict[int, int] = {}
        places = []
        end = 8 * len(moving)
        for place, (kind, value) in enumerate(launched.params):
            if place in moving:
                places.append(8 * list(moving).index(place))
                continue
            size = _SIZES.get(kind) or struct.calcsize(kind)
            end += -end % (_MAP_ALIGNMENT if kind == "M" else size)
            places.append(end)
            if kind == "M":
                self.buffer[end : end + size] = value.encode(addresses[place])
                self.maps[place] = ctypes.c_void_p(base + end)
                inside = value.address_place()
                if inside is not None:
                    self.map_words[place] = (end + inside) // 8
            else:
                struct.pack_into("Q" if kind == "P" else kind, self.buffer, end, addresses.get(place, value))
            end += size
        self._pointers = (ctypes.c_void_p * len(places))(*[base + place for place in places])
        wanted = [
            (_PROGRAMMATIC_STREAM_SERIALIZATION, launched.programmatic), (_COOPERATIVE, launched.cooperative)
        ]  # fmt: skip
        chosen = [number for number, wants in wanted if wants]
        self._attributes = (_Attribute * max(1, len(chosen)))()
        for slot, number in zip(self._attributes, chosen):
            slot.id, slot.value[0] = number, 1
        self._config = _Config(
            launched.grid, launched.block, launched.shared, stream, ctypes.addressof(self._attributes), len(chosen)
        )
        self.config = ctypes.c_void_p(ctypes.addressof(self._config))
        self.function = ctypes.c_void_p(launched.function)
        self.params = ctypes.c_void_p(ctypes.addressof(self._pointers))

    def failed(self, status: int) -> None:
        """Launch again in a thread that had no context yet; raise for anything else."""
        if status == _INVALID_CONTEXT:  # autograd's threads may not have met the driver before
            torch.cuda.synchronize()
            status = launch()(self.config, self.function, self.params, None)
        check(f"the launch of {self.launched.name}", status)


@cache
def library() -> Any:
    """The CUDA driver; OSError where there is none."""
    return ctypes.CDLL("libcuda.so.1")


@cache
def unavailable() -> str | None:
    """Why launches cannot be repeated by the driver here; None where they can."""
    try:
        launch(), replace_address(), library().cuTensorMapEncodeTiled
        from torch._C._dynamo.guards import _empty_strided_cuda  # type: ignore[attr-defined]  # noqa: F401
    except OSError as error:
        return f"the CUDA driver cannot be loaded ({error})"
    except AttributeError as error:
        return f"the CUDA driver is too old ({error})"
    except ImportError as error:
        return f"this torch has no short way to allocate ({error})"
    return None


@cache
def launch() -> Any:
    """cuLaunchKernelEx."""
    return library().cuLaunchKernelEx


@cache
def replace_address() -> Any:
    """cuTensorMapReplaceAddress: a tensor map for other memory."""
    return library().cuTensorMapReplaceAddress


def check(what: str, status: int) -> None:
    """Raise where the driver reports an error."""
    if status:
        text = ctypes.c_char_p()
        library().cuGetErrorName(ctypes.c_int(status), ctypes.byref(text))
        raise RuntimeError(f"{what} failed: {(text.value or b'unknown error').decode()}")


def parameter_sizes(function: int) -> list[int] | None:
    """The sizes in bytes of a kernel's parameters; None from a driver that cannot tell (before CUDA 12.4)."""
    ask = getattr(library(), "cuFuncGetParamInfo", None)
    if ask is None:
        return None
    sizes: list[int] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    while ask(ctypes.c_void_p(function), ctypes.c_size_t(len(sizes)), ctypes.byref(offset), ctypes.byref(size)) == 0:
        sizes.append(size.value)
    return sizes
