"""The compile tier: every Triton kernel for every architecture it claims, with no GPU. No stack spills, wide accesses.

Run with `-m compile`, in a process where Triton's interpreter is off.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch

from flashkernel.core import device as devices
from flashkernel.core.check import execute, wanted_gradients
from flashkernel.core.dispatch import BackendError
from flashkernel.core.launch import Launch, Machine, compile_for, recording
from flashkernel.core.op import Case, Op
from flashkernel.lab.selection import shapes_only
from flashkernel.ops import registry

pytestmark = pytest.mark.compile

PARKED = 160  # bytes of stack for values that loops only read back
GPUS = {75: "t4", 80: "a100", 90: "h200"}


def _selected() -> Iterator[object]:
    """Every benchmark case on the newest GPU; on older ones the first case, in float16 where bfloat16 is not native."""
    for op in registry().values():
        if not any(backend.name == "triton" for backend in op.backends):
            continue
        for arch in GPUS:
            for case in op.benches if arch == 90 else op.benches[:1]:
                dtype = torch.float16 if arch == 75 else case.dtypes[0]
                yield pytest.param(op, case, dtype, arch, id=f"{op.name}-{case.name}-sm{arch}")


def launches_of(op: Op, case: Case, dtype: torch.dtype, arch: int) -> list[Launch]:
    """What a call and its backward would launch, found by running them on meta tensors."""
    inputs = shapes_only(op, case, dtype)
    with devices.pretend(devices.KNOWN[GPUS[arch]]), recording() as launches:
        execute(op.call, inputs, {**case.options, "backend": "triton"}, wanted_gradients(op, case, inputs))
    return launches


@cache
def _compiled(key: tuple, arch: int) -> Machine:
    return compile_for(_by_key[key], arch)


_by_key: dict[tuple, Launch] = {}


def _key(launch: Launch) -> tuple:
    """Launches that compile to the same code have the same key."""
    from triton.runtime.jit import mangle_type

    args = tuple(
        (mangle_type(value), value % 16 == 0 if type(value) is int else None, value if value == 1 else None)
        if not isinstance(value, torch.Tensor)
        else mangle_type(value)
        for value in launch.args
        if value is not None
    )
    key = (launch.name, args, tuple(sorted(launch.constants.items(), key=lambda item: item[0])))
    _by_key.setdefault(key, launch)
    return key


@pytest.mark.parametrize("op, case, dtype, arch", list(_selected()))
def test_compiles_without_spills(op: Op, case: Case, dtype: torch.dtype, arch: int) -> None:
    try:
        launches = launches_of(op, case, dtype, arch)
    except BackendError as refusal:
        if arch >= 80:  # only what has no tensor cores in Triton may be declined
            raise
        pytest.skip(str(refusal).splitlines()[0])
    assert launches, f"{op.name} launched nothing"
    for launch in launches:
        machine = _compiled(_key(launch), arch)
        assert machine.stack <= PARKED and machine.spills_in_loops == 0, (
            f"{launch.name} {launch.constants} spills: {machine.stack} bytes of stack on sm_{arch}, "
            f"{machine.spills_in_loops} stores in loops"
        )
        assert machine.shared <= devices.KNOWN[GPUS[arch]].shared_per_block, (
            f"{launch.name} asks for {machine.shared} bytes"
        )
