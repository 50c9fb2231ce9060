"""Launches packed for the CUDA driver: every parameter lies where the driver looks for it, in its own format."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import pytest
import torch

from flashkernel.core import driver
from flashkernel.core.driver import Launched, PreparedLaunch, TensorMap

STREAM = 0x77


def _read(prepared: PreparedLaunch, place: int, kind: str) -> Any:
    """What the driver would read for a parameter."""
    pointers = (ctypes.c_void_p * len(prepared.launched.params)).from_address(prepared.params.value or 0)
    return struct.unpack(kind, ctypes.string_at(pointers[place], struct.calcsize(kind)))[0]


def test_parameters_are_packed_in_their_formats() -> None:
    x = torch.zeros(4)
    params = (("P", x), ("i", -3), ("P", None), ("q", 2**40), ("f", 0.5), ("b", 1), ("P", x), ("d", 1e-300))
    launched = Launched("kernel", params, 0x1234, (5, 6, 7), (128, 1, 1), 4096, programmatic=True)
    prepared = PreparedLaunch(launched, STREAM, moving=[0, 6], addresses={2: 0})
    prepared.pack(prepared.buffer, 0, 0xAAAA, 0xBBBB)
    found = [_read(prepared, place, "Q" if kind == "P" else kind) for place, (kind, _) in enumerate(params)]
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


@pytest.mark.parametrize("place_of_address", [0, 24, None])
def test_tensor_maps_take_addresses_where_they_hold_them(
    place_of_address: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(self: TensorMap, address: int) -> bytes:
        made = bytearray(range(128))
        if place_of_address is None:
            made[3:11] = struct.pack("Q", address)  # between words
        else:
            made[place_of_address : place_of_address + 8] = struct.pack("Q", address)
        return bytes(made)

    monkeypatch.setattr(TensorMap, "encode", encode)
    described = TensorMap(torch.zeros(8, 64), 9, (64, 8), (128,), (64, 8), 3, False)
    assert described.address_place() == place_of_address
    prepared = PreparedLaunch(Launched("kernel", (("i", 1), ("M", described))), STREAM, [], {1: 0x5550})
    start = prepared.maps[1].value or 0
    assert start % 64 == 0
    assert ctypes.string_at(start, 128) == encode(described, 0x5550)
    if place_of_address is None:
        assert not prepared.map_words
    else:
        prepared.words[prepared.map_words[1]] = 0x9990
        assert ctypes.string_at(start, 128) == encode(described, 0x9990)


@pytest.mark.gpu
def test_the_driver_takes_the_map_that_is_written_by_hand() -> None:
    """An address that is overwritten gives the same bytes as a map that was encoded for it."""
    x, y = (torch.zeros(16, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    described = TensorMap(x, 9, (64, 16), (128,), (64, 16), 3, False)
    prepared = PreparedLaunch(Launched("kernel", (("M", described),)), STREAM, [], {0: x.data_ptr()})
    if 0 in prepared.map_words:
        prepared.words[prepared.map_words[0]] = y.data_ptr()
    else:
        driver.replace_address()(prepared.maps[0], ctypes.c_void_p(y.data_ptr()))
    assert ctypes.string_at(prepared.maps[0].value or 0, 128) == described.encode(y.data_ptr())
