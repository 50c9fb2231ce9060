"""Records a call and generates a function that repeats it.

`record` runs a call once and notes its steps in order: allocations, kernel launches, torch operations, and writes that
autograd must know of. Every tensor in a step is traced to a slot: slots 0 to num_inputs - 1 are the call's tensor
arguments, each allocation takes the next one. A `Recording` turns the steps (core/recording_steps.py) into Python
source with one line or a few for each, so that a replay does no other work on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flashkernel.core import launch
from flashkernel.core.driver import LaunchRecord
from flashkernel.core.recording_steps import (
    AllocationStep,
    CannotRecord,
    DerivedStep,
    LaunchStep,
    OperationStep,
    SourceWriter,
    Step,
    View,
    WriteStep,
)

_aten = torch.ops.aten
_ALLOCATIONS = {
    _aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default, _aten.new_empty.default,
    _aten.new_empty_strided.default,
}  # fmt: skip
# Operations whose results depend on their arguments alone, not on autocast or other settings.
_OPERATIONS = {
    _aten.zero_.default, _aten.fill_.Scalar, _aten.copy_.default, _aten.clone.default, _aten._to_copy.default,
    _aten.zeros.default, _aten.new_zeros.default, _aten.zeros_like.default, _aten.full.default, _aten.new_full.default,
    _aten.mm.default, _aten.mm.out, _aten.addmm.default, _aten.addmm.out, _aten.addmm_.default, _aten.add_.Tensor,
    _aten.ne.Scalar,
}  # fmt: skip
_SUMS = {_aten.sum.dim_IntList, _aten.sum.default}
SHARED_MEMORY = "two of its arguments share memory"
TRANSIENT_REASONS = {SHARED_MEMORY}  # another call of the same shapes may be recorded all the same


def record(
    function: Callable[[], Any], tensors: Sequence[Tensor], launches: bool = True
) -> tuple[Any, Recording | str]:
    """Run a call and record it.

    Args:
        function: The call, without arguments.
        tensors: The call's tensor arguments, in order.
        launches: Whether a call that launches none of this library's kernels is uncacheable.

    Returns:
        The call's result, and its recording or the reason why there is none.
    """
    recorder = CallRecorder(tensors)
    with recorder, launch.observe(recorder):
        result = function()
    return result, recorder.recording(result, launches)


class Recording:
    """A recorded call. `run(tensors)` gives its result for other tensors of the same shapes, strides and dtypes."""

    def __init__(self, steps: list[Step], inputs: Sequence[Tensor], result: Any) -> None:
        from triton import knobs

        self._knobs = knobs.runtime
        num_inputs = len(inputs)
        steps = _without_unused_allocations(steps, result)
        self.steps = list(zip(steps, _last_used(steps, num_inputs, result)))
        out = SourceWriter(inputs[0].get_device())
        self.device, self.num_inputs, self.result = inputs[0].device, num_inputs, result
        self.program: Any = None  # that of core/native; a str: the reason why there is none
        self.persistent = [tensor for step in steps if isinstance(step, LaunchStep) for tensor in step.persistent]
        if self.persistent and out.device_index >= 0:
            out.line(f"if capturing(): keep_alive({out.name(self.persistent, 'persistent')})")
        for slot in sorted(
            {slot for step in steps for slot in step.slots()} | {view.slot for view in views_of(result)}
        ):
            if slot < num_inputs:
                out.line(f"v{slot} = tensors[{slot}]")
        _allocate_in_result_shape(steps, result)
        self.null_slots = out.null_slots = _null_slots(steps, result) if out.device_index >= 0 else set()
        for step, last_used in self.steps:
            step.emit(out)
            freed = [f"v{slot}" for slot in last_used if slot not in out.null_slots]
            if freed:
                out.line(f"del {', '.join(freed)}")
        parts = [view.expression(num_inputs) for view in views_of(result)]
        if result is not None:
            out.line(f"return ({', '.join(parts)},)" if isinstance(result, tuple) else f"return {parts[0]}")
        self.source = out.source()
        self.run: Callable[[Sequence[Tensor]], Any] = out.function(self.source)

    def hooked(self) -> bool:
        """True if a profiler has set hooks on Triton's launches: a replay would not call them."""
        knobs = self._knobs
        try:
            return bool(knobs.launch_enter_hook.calls or knobs.launch_exit_hook.calls)
        except AttributeError:  # a plain function was assigned instead of a chain of hooks
            return knobs.launch_enter_hook is not None or knobs.launch_exit_hook is not None


def views_of(result: View | tuple[View, ...] | None) -> tuple[View, ...]:
    return result if isinstance(result, tuple) else () if result is None else (result,)


def _without_unused_allocations(steps: list[Step], result: Any) -> list[Step]:
    """The steps but for allocations that no other step and no result uses."""
    used = {view.slot for view in views_of(result)}
    used |= {slot for step in steps if not isinstance(step, AllocationStep) for slot in step.slots()}
    return [step for step in steps if not isinstance(step, AllocationStep) or step.slot in used]


def _allocate_in_result_shape(steps: list[Step], result: Any) -> None:
    """Allocate an output in the shape in which it is returned, where that is a contiguous view of all of it."""
    allocations = {step.slot: step for step in steps if isinstance(step, AllocationStep)}
    for view in views_of(result):
        step = allocations.get(view.slot)
        returned_once = sum(other.slot == view.slot for other in views_of(result)) == 1
        used = any(isinstance(step, OperationStep) and view.slot in step.slots() for step in steps)
        if step is None or view.whole or not returned_once or used or view.offset or step.dtype != view.dtype:
            continue
        same_size = torch.Size(step.size).numel() == torch.Size(view.size).numel()
        if same_size and _contiguous(step.size, step.stride) and _contiguous(view.size, view.stride):
            step.size, step.stride, view.whole = view.size, view.stride, True


def _null_slots(steps: list[Step], result: Any) -> set[int]:
    """Slots of allocations without elements that only launches use: they become null pointers."""
    needed = {view.slot for view in views_of(result)}
    needed |= {slot for step in steps if not isinstance(step, (AllocationStep, LaunchStep)) for slot in step.slots()}
    return {step.slot for step in steps if isinstance(step, AllocationStep) and 0 in step.size} - needed


def _contiguous(size: Sequence[int], stride: Sequence[int]) -> bool:
    expected = 1
    for length, found in zip(reversed(size), reversed(stride)):
        if length != 1 and found != expected:
            return False
        expected *= length
    return True


class CallRecorder(TorchDispatchMode):
    """Notes the steps of a call: torch operations as a dispatch mode, launches as a `launch.LaunchObserver`."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.inputs = inputs
        self.num_inputs = len(inputs)
        self.tensors: dict[int, Tensor] = dict(enumerate(inputs))  # by slot
        self.steps: list[Step] = []
        self.reason: str | None = None  # why there is no recording
        self._paused = False
        self._allocated: dict[int, int] = {}  # storage -> slot
        self._input_slots: dict[int, list[int]] = {}  # storage -> slots of the inputs that lie in it
        for slot, x in self.tensors.items():
            self._input_slots.setdefault(_storage(x), []).append(slot)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.reason is None and not self._paused:
            self._try(lambda: self._record_operation(func, args, kwargs, result))
        return result

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Torch operations inside are not recorded."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def on_launch(self, record: LaunchRecord | str) -> None:
        """Record a launch; a string is the reason why it cannot be repeated."""
        if self.reason is None:
            self._try(lambda: self.steps.append(self._launch_step(record)))

    def on_write(self, x: Tensor) -> None:
        """Record that a kernel has written to `x`."""
        if self.reason is None:
            self._try(lambda: self.steps.append(WriteStep(self._view(x))))

    def on_derived(self, function: Callable[..., Any], tensors: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """Record that `results` were looked up, or made, from `tensors`."""
        if self.reason is None:
            self._try(lambda: self.steps.append(self._derived_step(function, tensors, results)))

    def _derived_step(
        self, function: Callable[..., Any], tensors: Sequence[Tensor], results: Sequence[Tensor]
    ) -> DerivedStep:
        given = [self._view(x) for x in tensors]
        slots = [self._allocated.get(_storage(x), -1) for x in results]  # -1 unless it was looked up before
        slots = [self._new_slot(x) if slot < 0 else slot for x, slot in zip(results, slots)]
        return DerivedStep(function, given, slots, self.num_inputs)

    def _launch_step(self, record: LaunchRecord | str) -> LaunchStep:
        if isinstance(record, str):
            raise CannotRecord(record)
        return LaunchStep(record, self)

    def recording(self, result: Any, launches: bool) -> Recording | str:
        """The recording, or the reason why there is none."""
        if launches and self.reason is None and not any(isinstance(step, LaunchStep) for step in self.steps):
            self.reason = "it launches no kernel of this library"
        if self.reason is None:
            try:
                if result is None:
                    return Recording(self.steps, self.inputs, None)
                views = tuple([self._view(one) for one in (result if isinstance(result, tuple) else (result,))])
                return Recording(self.steps, self.inputs, views if isinstance(result, tuple) else views[0])
            except (CannotRecord, RuntimeError) as error:  # RuntimeError: the driver refuses a tensor map
                self.reason = str(error)
        return self.reason

    def source(self, x: Tensor) -> tuple[int, int] | None:
        """(slot, byte offset from its tensor) of a tensor's first element; None for a tensor from outside the call."""
        storage = _storage(x)
        if storage in self._allocated:
            slot = self._allocated[storage]
            return slot, _offset(x, self.tensors[slot])
        slots = self._input_slots.get(storage)
        if slots is None:
            return None
        if len(slots) > 1:  # inputs that are views of one tensor: the address says which one is meant
            holding = [slot for slot in slots if _holds(self.tensors[slot], x.data_ptr())]
            slots = [slot for slot in holding if self.tensors[slot].data_ptr() == x.data_ptr()]
            if len(slots) != 1 or len(holding) != 1:
                raise CannotRecord(SHARED_MEMORY)
        return slots[0], _offset(x, self.tensors[slots[0]])

    def _try(self, note: Callable[[], None]) -> None:
        try:
            note()
        except CannotRecord as error:
            self.reason = str(error)
            # The rest of the call runs unrecorded and must be able to free what it allocated.
            self.steps, self.tensors, self._allocated, self._input_slots = [], {}, {}, {}

    def _record_operation(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        if func in _ALLOCATIONS:
            if result.device != self.inputs[0].device:
                raise CannotRecord(f"it allocates on {result.device}")
            self.steps.append(AllocationStep(self._new_slot(result), result))
            return
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        results = result if isinstance(result, (tuple, list)) else (result,)
        if not all(isinstance(one, Tensor) for one in results):
            raise CannotRecord(f"it asks torch for {func}")
        storages = set(map(_storage, tensors))
        if not func._schema.is_mutable and all(_storage(one) in storages for one in results):
            return  # a view: the steps that use it trace it to its slot
        # Autocast may change the dtype of other sums.
        exact = func in _SUMS and (kwargs.get("dtype") is not None or args[0].dtype in (torch.float32, torch.bool))
        if func not in _OPERATIONS and not exact:
            raise CannotRecord(f"it asks torch for {func}")
        traced = [self._argument(value) for value in args]
        traced_by_name = {name: self._argument(value) for name, value in kwargs.items()}
        slot = None if func._schema.is_mutable else self._new_slot(result)
        self.steps.append(OperationStep(func, traced, traced_by_name, slot, self.num_inputs))

    def _argument(self, value: Any) -> Any:
        return self._view(value) if isinstance(value, Tensor) else value

    def _view(self, x: Any) -> View:
        source = self.source(x) if isinstance(x, Tensor) else None
        if source is None:
            raise CannotRecord("its result or an operand is a tensor from outside the call")
        return View(*source, x, self.tensors[source[0]])

    def _new_slot(self, x: Tensor) -> int:
        slot = self._allocated[_storage(x)] = self.num_inputs + len(self._allocated)
        self.tensors[slot] = x
        return slot


def _storage(x: Tensor) -> int:
    """The identity of a tensor's storage, unique while it lives."""
    return x.untyped_storage()._cdata


def _offset(x: Tensor, base: Tensor) -> int:
    """Bytes from a tensor's first element to that of another in its memory. One without elements has no address."""
    return x.data_ptr() - base.data_ptr() if x.numel() else 0


def _holds(x: Tensor, address: int) -> bool:
    """Whether one of a tensor's elements begins at an address."""
    left, within = divmod(address - x.data_ptr(), x.element_size())
    if left < 0 or within or x.numel() == 0:
        return False
    for stride, size in sorted(zip(x.stride(), x.shape), reverse=True):
        if stride:
            left -= stride * min(left // stride, size - 1)
    return left == 0


def _last_used(steps: list[Step], num_inputs: int, result: Any) -> list[tuple[int, ...]]:
    """For each step, the allocated slots that no later step uses: their memory can be allocated again."""
    returned = {view.slot for view in views_of(result)}
    last = {slot: number for number, step in enumerate(steps) for slot in step.slots()}
    return [
        tuple(slot for slot, at in last.items() if at == number and slot >= num_inputs and slot not in returned)
        for number in range(len(steps))
    ]
