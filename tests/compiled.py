"""Kernels compiled for GPUs that need not be here, each once in a process."""

from __future__ import annotations

from typing import Any

from flashkernel.core.launch import Launch, Machine, compile_for

_done: dict[tuple[Any, ...], Machine] = {}


def compiled(launch: Launch, arch: int) -> Machine:
    """The machine code of a launch. Launches of one kernel with the same constants and types of arguments share it:
    that a number happens to be divisible by 16 is not compiled for again."""
    key = (launch.kernel, arch, _kinds(launch), tuple(sorted(launch.constants.items())))
    if key not in _done:
        _done[key] = compile_for(launch, arch)
    return _done[key]


def _kinds(launch: Launch) -> tuple[Any, ...]:
    """The types of the arguments; those of None and of 1 are values, which are compiled in."""
    from triton.runtime.jit import mangle_type

    def kind(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(kind(element) for element in value)
        if value is None or (type(value) is int and value == 1):
            return value
        return mangle_type(value)

    return tuple(kind(value) for value in launch.args)
