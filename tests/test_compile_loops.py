"""The compile tier finds values that Triton loses, whose loops then have the bounds of the first iteration."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compiled import compile_for

from flashkernel.core.gluon import gl, gluon
from flashkernel.core.launch import Launch

pytestmark = pytest.mark.compile


@gluon.jit
def _carried(out, counts, rows):
    """Carries the bound of the inner loop: Triton 3.6 loses it."""
    count = gl.load(counts)
    total = 0
    for row in range(rows):
        for column in range(count):
            total += gl.load(counts + column)
        count = gl.load(counts + row + 1)
    gl.store(out, total)


@gluon.jit
def _loaded(out, counts, rows):
    """Loads it inside."""
    total = 0
    for row in range(rows):
        for column in range(gl.load(counts + row)):
            total += gl.load(counts + column)
    gl.store(out, total)


@gluon.jit
def _also_stored(out, counts, rows):
    """Carries it, and stores it: it is not lost."""
    count = gl.load(counts)
    total = 0
    for row in range(rows):
        for column in range(count):
            total += gl.load(counts + column)
        gl.store(out + row, count)
        count = gl.load(counts + row + 1)
    gl.store(out, total)


@pytest.mark.parametrize("kernel, lost", [(_carried, True), (_loaded, False), (_also_stored, False)])
def test_finds_values_that_only_bounds_read(kernel: Any, lost: bool) -> None:
    numbers = torch.zeros(64, dtype=torch.int32)
    machine = compile_for(Launch(kernel, (1,), (numbers, numbers, 5), {"num_warps": 4}), 90)
    assert bool(machine.lost) == lost
