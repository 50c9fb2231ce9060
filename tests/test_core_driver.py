"""Launches packed for the CUDA driver: every parameter lies where the driver looks for it, in its own format."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import pytest
import torch

from flashkernel.core import driver, recording, recording_steps
from flashkernel.core import launch as launching
from flashkernel.core.driver import LaunchRecord, PreparedLaunch, TensorMap

STREAM = 0x77


def _read(prepared: PreparedLaunch, index: int, kind: str) -> Any:
    """What the driver would read for a parameter."""
    pointers = (ctypes.c_void_p * len(prepared.record.params)).from_address(prepared.params.value or 0)
    return struct.unpack(kind, ctypes.string_at(pointers[index], struct.calcsize(kind)))[0]


def test_parameters_are_packed_in_their_formats() -> None:
    x = torch.zeros(4)
    params = (("P", x), ("i", -3), ("P", None), ("q", 2**40), ("f", 0.5), ("b", 1), ("P", x), ("d", 1e-300))
    record = LaunchRecord("kernel", params, 0x1234, (5, 6, 7), (128, 1, 1), 4096, programmatic=True)
    prepared = PreparedLaunch(record, STREAM, variable=[0, 6], addresses={2: 0})
    prepared.pack(prepared.buffer, 0, 0xAAAA, 0xBBBB)
    found = [_read(prepared, index, "Q" if kind == "P" else kind) for index, (kind, _) in enumerate(params)]
    assert found == [0xAAAA, -3, 0, 2**40, 0.5, 1, 0xBBBB, 1e-300]
    config = driver._Config.from_address(prepared.config.value or 0)
    assert (list(config.grid), list(config.block), config.shared, config.stream) == (
        [5, 6, 7],
        [128, 1, 1],
        4096,
        STREAM,
    )
    attribute = driver._Attribute.from_address(config.attributes)
    assert (config.attribute_count, attribute.id, attribute.value[0]) == (1, 6, 1)  # programmatic stream serialization


@pytest.mark.parametrize("offset_of_address", [0, 24, None])
def test_tensor_maps_take_addresses_where_they_hold_them(
    offset_of_address: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(self: TensorMap, address: int) -> bytes:
        made = bytearray(range(128))
        if offset_of_address is None:
            made[3:11] = struct.pack("Q", address)  # between words
        else:
            made[offset_of_address : offset_of_address + 8] = struct.pack("Q", address)
        return bytes(made)

    monkeypatch.setattr(TensorMap, "encode", encode)
    described = TensorMap(torch.zeros(8, 64), 9, (64, 8), (128,), (64, 8), 3, False)
    assert described.address_offset() == offset_of_address
    prepared = PreparedLaunch(LaunchRecord("kernel", (("i", 1), ("M", described))), STREAM, [], {1: 0x5550})
    start = prepared.maps[1].value or 0
    assert start % 64 == 0
    assert ctypes.string_at(start, 128) == encode(described, 0x5550)
    if offset_of_address is None:
        assert not prepared.map_words
    else:
        prepared.words[prepared.map_words[1]] = 0x9990
        assert ctypes.string_at(start, 128) == encode(described, 0x9990)


@pytest.mark.gpu
def test_the_driver_takes_the_map_that_is_written_by_hand() -> None:
    """An address that is overwritten gives the same bytes as a map that was encoded for it."""
    x, y = (torch.zeros(16, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    described = TensorMap(x, 9, (64, 16), (128,), (64, 16), 3, False)
    prepared = PreparedLaunch(LaunchRecord("kernel", (("M", described),)), STREAM, [], {0: x.data_ptr()})
    if 0 in prepared.map_words:
        prepared.words[prepared.map_words[0]] = y.data_ptr()
    else:
        driver.replace_address()(prepared.maps[0], ctypes.c_void_p(y.data_ptr()))
    assert ctypes.string_at(prepared.maps[0].value or 0, 128) == described.encode(y.data_ptr())


def test_a_recorded_launch_writes_the_addresses_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source that a recording generates for a GPU, run with a driver and an allocator that take notes."""
    launches: list[tuple[Any, ...]] = []
    prepared: list[PreparedLaunch] = []

    class Prepared(PreparedLaunch):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            prepared.append(self)

    def launch(config: Any, function: Any, params: Any, extra: Any) -> int:
        pointers = [_read(prepared[0], index, "Q") for index in (0, 2)]
        size = _read(prepared[0], 1, "i")
        launches.append((function.value, *pointers, size))
        return 0

    def empty(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype)

    monkeypatch.setattr(recording_steps, "PreparedLaunch", Prepared)
    monkeypatch.setattr(driver, "launch", lambda: launch)
    monkeypatch.setattr(driver, "replace_address", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM, raising=False)
    monkeypatch.setattr(torch._C._dynamo.guards, "_empty_strided_cuda", empty, raising=False)
    monkeypatch.setattr(recording, "SourceWriter", lambda device_index: recording_steps.SourceWriter(0))

    def call(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(4, 8)
        launching.notify_launch(LaunchRecord("kernel", (("P", x[1:]), ("i", 7), ("P", out)), 0x1234, (4, 1, 1)))
        launching.mark_written(x)
        return out.view(32)

    x = torch.zeros(4, 8)
    _, recorded = recording.record(lambda: call(x), [x])
    assert isinstance(recorded, recording.Recording), recorded
    other = torch.zeros(4, 8)
    version = other._version
    result = recorded.run([other])
    assert result.shape == (32,)
    assert other._version == version + 1
    assert launches == [(0x1234, other.data_ptr() + 32, result.data_ptr(), 7)]
