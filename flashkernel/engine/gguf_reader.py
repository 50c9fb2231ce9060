"""The GGUF container: fields and tensors of a file.

The `gguf` package reads it too, but takes seconds for a vocabulary: it makes an array of every string. Here a string
is a slice. The package still knows the quantization formats.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flashkernel.engine.config import ModelError

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_DIMS = 8


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as it lies in the file: rows of bytes, or of numbers where it is not quantized."""

    data: np.ndarray  # [..., bytes or numbers of a row]
    kind: Any  # gguf.GGMLQuantizationType
    shape: tuple[int, ...]  # of the numbers, outermost first


class Cursor:
    """Reads forward through a file's bytes; struct.error or IndexError where they end too early."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.offset = data, 0

    def scalar(self, form: str) -> Any:
        (value,) = struct.unpack_from("<" + form, self.data, self.offset)
        self.offset += struct.calcsize("<" + form)
        return value

    def text(self) -> str:
        size = self.scalar("Q")
        start, self.offset = self.offset, self.offset + size
        if self.offset > len(self.data):
            raise IndexError(f"a string of {size} bytes goes beyond the end")
        return self.data[start : self.offset].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        inner, count = self.scalar("I"), self.scalar("Q")
        if count > len(self.data):
            raise IndexError(f"an array of {count} entries goes beyond the end")
        if inner in (_STRING, _ARRAY):
            return [self.value(inner) for _ in range(count)]
        form = f"<{count}{_SCALARS[inner]}"
        values = list(struct.unpack_from(form, self.data, self.offset))
        self.offset += struct.calcsize(form)
        return values


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """(fields, tensors) by name; tensors are views of the file."""
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise ModelError(f"{path}: GGUF files take the gguf package; pip install gguf") from error
    with path.open("rb") as file:
        if file.read(4) != _MAGIC:
            raise ModelError(f"{path}: this is no GGUF file; a model is a GGUF file or a folder with safetensors")
        cursor = Cursor(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    try:
        return _read(cursor, path)
    except (
        struct.error,
        IndexError,
        KeyError,
        ValueError,
        TypeError,
        OverflowError,
        MemoryError,
        RecursionError,
    ) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{path}: the file is damaged or was cut short ({error}); get it again") from error


def _read(cursor: Cursor, path: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    cursor.offset = len(_MAGIC)
    version = cursor.scalar("I")
    if version not in _VERSIONS:
        raise ModelError(f"{path}: GGUF version {version} is not known; there are {', '.join(map(str, _VERSIONS))}")
    count, fields_count = cursor.scalar("Q"), cursor.scalar("Q")
    fields: dict[str, Any] = {}
    for _ in range(fields_count):
        name = cursor.text()
        fields[name] = cursor.value(cursor.scalar("I"))
    described = []
    for _ in range(count):
        name, dims = cursor.text(), cursor.scalar("I")
        if dims > _MAX_DIMS:
            raise ValueError(f"{name} has {dims} dims")
        shape = tuple(cursor.scalar("Q") for _ in range(dims))[::-1]
        described.append((name, shape, cursor.scalar("I"), cursor.scalar("Q")))
    step = fields.get("general.alignment", 32)
    if not isinstance(step, int) or step < 1:
        raise ValueError(f"general.alignment is {step!r}")
    start = -(-cursor.offset // step) * step
    return fields, {name: _tensor(cursor.data, start + at, shape, kind) for name, shape, kind, at in described}


def _tensor(data: mmap.mmap, offset: int, shape: tuple[int, ...], number: int) -> StoredTensor:
    import gguf

    kind = gguf.GGMLQuantizationType(number)
    plain = {gguf.GGMLQuantizationType.F32: "f4", gguf.GGMLQuantizationType.F16: "f2"}
    stored = shape if kind in plain else gguf.quant_shape_to_byte_shape(shape, kind)
    values = np.frombuffer(data, "<" + plain.get(kind, "u1"), math.prod(stored), offset)
    return StoredTensor(values.reshape(stored), kind, shape)
