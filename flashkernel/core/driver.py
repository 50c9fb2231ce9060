"""Kernel launches through the CUDA driver API (cuLaunchKernelEx), called by ctypes.

Triton and cuda-core pack all arguments at every launch. A `PreparedLaunch` keeps them packed: to launch again, only the
addresses of tensors are written. It needs the loaded kernel (CUfunction) and the types of its parameters.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

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

    base: Any  # the Tensor, or in a recording its address
    dtype: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]  # bytes, from the second dim on
    box: tuple[int, ...]
    swizzle: int
    nan_fill: bool

    def encode(self, address: int) -> bytes:
        """The 128-byte CUtensorMap for a tensor at `address`."""
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

    def address_offset(self) -> int | None:
        """The offset of the 8 bytes that hold the address and nothing else; None where there are none such."""
        one, other = 0x7F0123456780, 0x7A9876543210
        first, second = self.encode(one), self.encode(other)
        for offset in range(0, _MAP_BYTES, 8):
            found = [struct.unpack_from("Q", encoded, offset)[0] for encoded in (first, second)]
            after = offset + 8
            if found == [one, other] and first[:offset] + first[after:] == second[:offset] + second[after:]:
                return offset
        return None


@dataclass(frozen=True)
class LaunchRecord:
    """All that is needed to repeat a launch.

    `params` are the kernel's parameters in order, each a pair of format and value. A format is "P" for a pointer (a
    Tensor, an address or None), "M" for a TensorMap, or one of Python's struct module. Under Triton's interpreter
    there is no CUfunction: `rerun` takes the values of `params` and runs the kernel.
    """

    name: str
    params: tuple[tuple[str, Any], ...]
    function: int = 0  # CUfunction
    grid: tuple[int, int, int] = (1, 1, 1)
    block: tuple[int, int, int] = (1, 1, 1)
    shared: int = 0
    programmatic: bool = False  # programmatic dependent launch
    cooperative: bool = False
    owner: Any = field(default=None, repr=False)  # keeps the code loaded
    rerun: Callable[[Sequence[Any]], None] | None = field(default=None, repr=False)

    def mismatch(self) -> str | None:
        """The reason why `params` do not fit the loaded function, by their sizes; None where they fit."""
        if self.function == 0:
            return None
        packed = [_SIZES.get(kind) or struct.calcsize(kind) for kind, _ in self.params]
        found = parameter_sizes(self.function)
        if found is None or found == packed:
            return None
        return f"{self.name} has parameters of {found} bytes where {packed} were packed"


class PreparedLaunch:
    """A launch on one stream with all its parameters packed in host memory.

    To launch it for other tensors: write the addresses of the variable pointers with `pack(buffer, 0, *addresses)`;
    write those of tensor maps to `words[map_words[index]]`, or with `replace_address(maps[index], address)` for maps
    that mix their address with other bits; then call `launch(config, function, params, None)`.
    """

    def __init__(self, record: LaunchRecord, stream: int, variable: Sequence[int], addresses: dict[int, int]) -> None:
        """Pack the parameters.

        Args:
            record: The launch to repeat.
            stream: CUstream handle.
            variable: Indices of the pointer parameters whose addresses change from launch to launch.
            addresses: The addresses of all other pointers, and the first ones of tensor maps, by parameter index.
        """
        self.record = record  # keeps the code loaded
        total = 8 * len(variable) + sum(_MAP_BYTES for _ in record.params) + _MAP_ALIGNMENT
        self._space = ctypes.create_string_buffer(total)
        start = -ctypes.addressof(self._space) % _MAP_ALIGNMENT
        self.buffer = (ctypes.c_char * ((total - start) // 8 * 8)).from_buffer(self._space, start)
        base = ctypes.addressof(self.buffer)
        self.pack = struct.Struct(f"{len(variable)}Q").pack_into
        self.words = memoryview(self.buffer).cast("B").cast("Q")
        self.maps: dict[int, ctypes.c_void_p] = {}
        self.map_words: dict[int, int] = {}
        offsets = []
        end = 8 * len(variable)  # variable pointers come first, in one piece
        for index, (kind, value) in enumerate(record.params):
            if index in variable:
                offsets.append(8 * list(variable).index(index))
                continue
            size = _SIZES.get(kind) or struct.calcsize(kind)
            end += -end % (_MAP_ALIGNMENT if kind == "M" else size)
            offsets.append(end)
            if kind == "M":
                self.buffer[end : end + size] = value.encode(addresses[index])
                self.maps[index] = ctypes.c_void_p(base + end)
                inside = value.address_offset()
                if inside is not None:
                    self.map_words[index] = (end + inside) // 8
            else:
                struct.pack_into("Q" if kind == "P" else kind, self.buffer, end, addresses.get(index, value))
            end += size
        self._pointers = (ctypes.c_void_p * len(offsets))(*[base + offset for offset in offsets])
        available = [(_PROGRAMMATIC_STREAM_SERIALIZATION, record.programmatic), (_COOPERATIVE, record.cooperative)]
        attributes = [number for number, wanted in available if wanted]
        self._attributes = (_Attribute * max(1, len(attributes)))()
        for slot, number in zip(self._attributes, attributes):
            slot.id, slot.value[0] = number, 1
        self._config = _Config(
            record.grid, record.block, record.shared, stream, ctypes.addressof(self._attributes), len(attributes)
        )
        self.config = ctypes.c_void_p(ctypes.addressof(self._config))
        self.function = ctypes.c_void_p(record.function)
        self.params = ctypes.c_void_p(ctypes.addressof(self._pointers))

    def handle_error(self, status: int) -> None:
        """Launch again if this thread had no CUDA context; RuntimeError for any other status."""
        if status == _INVALID_CONTEXT:  # autograd's threads may not have called the driver before
            torch.cuda.synchronize()
            status = launch()(self.config, self.function, self.params, None)
        self.check(status)

    def check(self, status: int) -> None:
        """RuntimeError where the launch returned an error."""
        check(f"the launch of {self.record.name}", status)


@cache
def library() -> Any:
    """The CUDA driver; OSError where there is none."""
    return ctypes.CDLL("libcuda.so.1")


@cache
def unavailable() -> str | None:
    """The reason why the driver cannot repeat launches here; None where it can."""
    try:
        launch(), replace_address(), library().cuTensorMapEncodeTiled
        from torch._C._dynamo.guards import _empty_strided_cuda  # type: ignore[attr-defined]  # noqa: F401
    except OSError as error:
        return f"the CUDA driver cannot be loaded ({error})"
    except AttributeError as error:
        return f"the CUDA driver is too old ({error})"
    except ImportError as error:
        return f"this torch has no _empty_strided_cuda to allocate with ({error})"
    return None


@cache
def launch() -> Any:
    """cuLaunchKernelEx."""
    return library().cuLaunchKernelEx


@cache
def replace_address() -> Any:
    """cuTensorMapReplaceAddress."""
    return library().cuTensorMapReplaceAddress


def check(what: str, status: int) -> None:
    """RuntimeError where a driver call returned an error."""
    if status:
        text = ctypes.c_char_p()
        library().cuGetErrorName(ctypes.c_int(status), ctypes.byref(text))
        raise RuntimeError(f"{what} failed: {(text.value or b'unknown error').decode()}")


def parameter_sizes(function: int) -> list[int] | None:
    """The sizes in bytes of a kernel's parameters; None with a driver older than CUDA 12.4, which cannot tell."""
    ask = getattr(library(), "cuFuncGetParamInfo", None)
    if ask is None:
        return None
    sizes: list[int] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    while ask(ctypes.c_void_p(function), ctypes.c_size_t(len(sizes)), ctypes.byref(offset), ctypes.byref(size)) == 0:
        sizes.append(size.value)
    return sizes
