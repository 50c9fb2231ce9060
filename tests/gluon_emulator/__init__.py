"""Runs a recorded Gluon launch on the CPU: warps become threads, and what is asynchronous happens at random times.

Triton has no interpreter for Gluon. This one knows what the kernels of this project use: it checks their arithmetic,
every address, that barriers are neither missed nor overrun, that a buffer is not overwritten while it is read, and that
what threads write to shared memory is fenced before WGMMA or TMA reads it. A matrix product reads its operands, and a
tile copy moves its bytes, at some moment between issue and wait. When all threads wait and nothing is under way, that
is reported as a deadlock. One thread runs at a time, and the seed decides which, so that a failure can be repeated.
Layouts are not looked at.
"""

from __future__ import annotations

import random
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashkernel.core.launch import Launch, notify_launch
from gluon_emulator.language import KNOWN
from gluon_emulator.machine import Machine, local
from gluon_emulator.memory import Descriptor, Pointer
from gluon_emulator.values import as_value


def _plain(function: Any, done: dict[int, Any]) -> Any:
    """The Python function behind a jitted one, over emulated names."""
    if id(function) in done:
        return done[id(function)]
    names: dict[str, Any] = {}
    made = types.FunctionType(function.fn.__code__, names, function.fn.__name__, function.fn.__defaults__)
    done[id(function)] = made
    for name, value in function.fn.__globals__.items():
        if name in KNOWN:
            names[name] = KNOWN[name]
        elif hasattr(value, "fn") and hasattr(value, "arg_names"):
            names[name] = _plain(value, done)
        elif type(value).__name__ == "constexpr":
            names[name] = value.value
        else:
            names[name] = value
    return made


def _argument(value: Any, done: dict[int, Any]) -> Any:
    if isinstance(value, tuple):
        elements = [_argument(element, done) for element in value]
        return type(value)(*elements) if hasattr(value, "_fields") else tuple(elements)
    if isinstance(value, Tensor):
        # Kernels take addresses, not shapes.
        size = value.untyped_storage().nbytes() // value.element_size()
        return Pointer(torch.as_strided(value.detach(), (size,), (1,), 0), value.storage_offset())
    if hasattr(value, "block_shape"):
        return Descriptor(value)
    if hasattr(value, "fn") and hasattr(value, "arg_names"):
        return _plain(value, done)
    return as_value(torch.tensor(value)) if type(value) in (int, float) else value


def run(launch: Launch, programs: int | None = None, seed: int = 0) -> None:
    """Execute a recorded launch on its CPU tensors, over its own grid or as many programs as given."""
    notify_launch("the emulator runs it")
    done: dict[int, Any] = {}
    kernel = _plain(launch.kernel, done)
    names = launch.kernel.arg_names
    args = {name: _argument(value, done) for name, value in zip(names, launch.args)}
    constants = {
        name: _plain(value, done) if hasattr(value, "arg_names") else value
        for name, value in launch.constants.items()
        if name in names
    }
    grid = launch.grid[0] if programs is None else min(programs, launch.grid[0])
    assert all(size == 1 for size in launch.grid[1:]), "grids of one dimension only"
    for program in range(grid):
        machine = Machine(program, grid, random.Random(seed * 1009 + program))
        local.machine = machine
        with torch.no_grad():
            kernel(**args, **constants)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """What a package's `launch` is replaced by: Gluon kernels run here, others in Triton's interpreter."""
    if 0 in grid:
        return
    if hasattr(kernel, "is_gluon") and kernel.is_gluon():
        run(Launch(kernel, grid, args, constants))
    else:
        kernel[grid](*args, **constants)


def counting_retries(counts: list[Any]) -> Callable[..., None]:
    """`launch`, which also appends for each pass how many items it flagged for a retry; None where it has no flags."""

    def counted(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        launch(kernel, grid, *args, **constants)
        if "retry_flags" in kernel.arg_names:
            retry_flags = args[kernel.arg_names.index("retry_flags")]
            counts.append(None if retry_flags is None else int((retry_flags[:, 1:] > 0).sum()))

    return counted
