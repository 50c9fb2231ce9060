"""Recordings (core/recording.py) as programs of the C++ extension (program.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flashkernel.core import driver, tables
from flashkernel.core.recording import Recording, views_of
from flashkernel.core.recording_steps import (
    AllocationStep,
    DerivedStep,
    LaunchStep,
    OperationStep,
    Step,
    View,
    WriteStep,
)


@dataclass
class Inputs:
    """Where a program finds the inputs of a recording.

    Attributes:
        slots: The program's slot of each input of the recording.
        num_given: The tensors that the program is given lie in the slots below.
        constants: (slot, tensor) of those that are the same at every run.
        calls: Steps that look tensors up before those of the recording, as `call` makes them.
        saved: Slots that are results beside those of the recording.
    """

    slots: list[int]
    num_given: int
    constants: list[tuple[int, Tensor]] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The first slot after them."""
        results = [slot for call in self.calls for slot in call["results"]]
        return max([self.num_given - 1, *[slot for slot, _ in self.constants], *results]) + 1


def program(extension: Any, recording: Recording, inputs: Inputs | None = None) -> Any:
    """A Program that does what the recording does, on the current stream."""
    if inputs is None:
        inputs = Inputs(list(range(recording.num_inputs)), recording.num_inputs)
    try:
        return extension.Program(_Description(recording, inputs, True).whole())
    except TypeError:  # an operation with an argument that C++ does not convert: Python calls torch instead
        return extension.Program(_Description(recording, inputs, False).whole())


def call(function: Callable[..., Sequence[Tensor]], args: Sequence[Any], results: Sequence[int]) -> dict[str, Any]:
    """A step that calls `function` with tensors (as `whole_slot` gives them) and other values."""
    return {"kind": "call", "function": function, "args": list(args), "results": list(results), "freed": []}


def whole_slot(slot: int) -> dict[str, Any]:
    """The tensor of a slot, as an argument of a step."""
    nothing = {"size": (), "stride": (), "offset": 0, "cast": False, "dtype": torch.uint8}
    return {"slot": slot, "whole": True, "given": True, **nothing}


class _Description:
    """A recording in the terms of a program."""

    def __init__(self, recording: Recording, inputs: Inputs, boxed: bool) -> None:
        self.recording, self.inputs, self.boxed = recording, inputs, boxed

    def whole(self) -> dict[str, Any]:
        recording, inputs = self.recording, self.inputs
        steps = list(inputs.calls)
        for step, last_used in recording.steps:
            described = self._step(step)
            if described is not None:
                described["freed"] = [self._slot(slot) for slot in last_used]
                steps.append(described)
        allocated = {slot for step, _ in recording.steps for slot in step.slots() if slot >= recording.num_inputs}
        return {
            "num_given": inputs.num_given,
            "num_slots": 1 + max([inputs.end - 1, *map(self._slot, allocated)]),
            "constants": inputs.constants,
            "steps": steps,
            "results": [*map(self._view, views_of(recording.result)), *map(whole_slot, inputs.saved)],
            "persistent": self._persistent(),
        }

    def _slot(self, slot: int) -> int:
        within = slot - self.recording.num_inputs
        return self.inputs.slots[slot] if within < 0 else self.inputs.end + within

    def _view(self, view: View) -> dict[str, Any]:
        return {
            "slot": self._slot(view.slot), "whole": view.whole, "given": view.slot < self.recording.num_inputs,
            "size": view.size, "stride": view.stride, "offset": view.offset, "cast": view.cast, "dtype": view.dtype,
        }  # fmt: skip

    def _value(self, value: Any) -> Any:
        return self._view(value) if isinstance(value, View) else value

    def _step(self, step: Step) -> dict[str, Any] | None:
        if isinstance(step, AllocationStep):
            if step.slot in self.recording.null_slots:
                return None
            return {
                "kind": "allocate", "slot": self._slot(step.slot), "size": step.size, "stride": step.stride,
                "dtype": step.dtype, "device": self.recording.device,
            }  # fmt: skip
        if isinstance(step, WriteStep):
            return {"kind": "write", "view": self._view(step.view)}
        if isinstance(step, DerivedStep):
            return call(step.function, [self._view(view) for view in step.given], list(map(self._slot, step.results)))
        if isinstance(step, OperationStep):
            return self._boxed_operation(step) if self.boxed else self._operation(step)
        assert isinstance(step, LaunchStep)
        return self._launch(step) if step.record.rerun is None else self._rerun(step)

    def _boxed_operation(self, step: OperationStep) -> dict[str, Any]:
        schema, args = step.function._schema, []
        for index, argument in enumerate(schema.arguments):
            if index < len(step.args):
                args.append(self._value(step.args[index]))
            else:
                args.append(self._value(step.kwargs.get(argument.name, argument.default_value)))
        return {
            "kind": "operation", "name": schema.name, "overload": schema.overload_name, "args": args,
            "slot": -1 if step.slot is None else self._slot(step.slot),
        }  # fmt: skip

    def _operation(self, step: OperationStep) -> dict[str, Any]:
        function, count, names = step.function, len(step.args), list(step.kwargs)

        def run(*values: Any) -> tuple[Any]:
            return (function(*values[:count], **dict(zip(names, values[count:]))),)

        values = [self._value(value) for value in (*step.args, *step.kwargs.values())]
        return call(run, values, [] if step.slot is None else [self._slot(step.slot)])

    def _rerun(self, step: LaunchStep) -> dict[str, Any]:
        rerun = step.record.rerun
        assert rerun is not None
        values = [
            self._view(step.views[index]) if index in step.views else value
            for index, (_, value) in enumerate(step.record.params)
        ]

        def run(*given: Any) -> tuple[()]:
            rerun(given)
            return ()

        return call(run, values, [])

    def _launch(self, step: LaunchStep) -> dict[str, Any]:
        prepared, sources = step.prepare(_stream(self.recording.device), self.recording.null_slots)
        base = ctypes.addressof(prepared.buffer)
        words: list[tuple[int, int, int]] = []
        maps: list[tuple[int, int, int]] = []
        pointers = 0
        for index, (slot, offset) in sources.items():
            if step.record.params[index][0] == "P":
                words.append((self._slot(slot), offset, base + 8 * pointers))
                pointers += 1
            elif index in prepared.map_words:
                words.append((self._slot(slot), offset, base + 8 * prepared.map_words[index]))
            else:
                maps.append((self._slot(slot), offset, prepared.maps[index].value or 0))
        return {
            "kind": "launch", "launch": _address(driver.launch()),
            "replace_address": _address(driver.replace_address()),
            "config": prepared.config.value, "function": prepared.function.value or 0, "params": prepared.params.value,
            "words": words, "maps": maps, "prepared": prepared,
        }  # fmt: skip

    def _persistent(self) -> dict[str, Any] | None:
        persistent, device = self.recording.persistent, self.recording.device
        if not persistent or device.type != "cuda":
            return None
        return {
            "tables": persistent, "keep_alive": tables.keep_alive, "stream": _stream(device),
            "is_capturing": _address(driver.library().cuStreamIsCapturing),
        }  # fmt: skip


def _stream(device: torch.device) -> int:
    return torch._C._cuda_getCurrentRawStream(device.index)


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0
