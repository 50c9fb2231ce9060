"""What a call launches, kept, and launched again for other tensors of the same shapes.

On the way to its launches a call checks, chooses configs, looks up tables and describes tiles, and Triton works out
which machine code fits the arguments. All of that follows from shapes, strides, dtypes and settings, and takes the host
longer than small kernels take the GPU. So the second time such arguments come, the call is recorded: what it allocates,
launches and asks of torch, in order, with every tensor traced to an argument or an allocation. From the third time on
only that is done.

A function qualifies if it never looks at what tensors hold, as none that a CUDA graph can capture does. Calls stay as
they are where a recording would not tell the whole story: with tables of a mask, which come as lists; where arguments
lie in the same memory and cannot be told apart; where torch is asked for more than the few operations below; and all
of them with FLASHKERNEL_REPLAY=0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flashkernel.core import device, env, launch, tune

MOST_CALLS = 512  # kept for each function
_aten = torch.ops.aten
_ALLOCATIONS = {
    _aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default, _aten.new_empty.default,
    _aten.new_empty_strided.default,
}  # fmt: skip
# Whose results depend on their arguments alone, not on autocast or other settings.
_OPERATIONS = {
    _aten.zero_.default, _aten.fill_.Scalar, _aten.copy_.default, _aten.clone.default, _aten._to_copy.default,
    _aten.zeros.default, _aten.new_zeros.default, _aten.zeros_like.default, _aten.full.default, _aten.new_full.default,
}  # fmt: skip
_MET, _UNFIT = object(), object()  # seen once; cannot be recorded


class Remembered:
    """A function of tensors, empty lists and plain values that launches kernels, with the calls it knows."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.calls: dict[tuple[Any, ...], Any] = {}

    def __call__(self, *args: Any) -> Any:
        key = _key(args)
        if key is None:
            return self.function(*args)
        call = self.calls.get(key)
        if type(call) is _Call:
            return call(args, key[0])
        if call is _MET:
            result, self.calls[key] = _record(self.function, args)
            return result
        if call is None:
            if len(self.calls) >= MOST_CALLS:
                self.calls.clear()
            self.calls[key] = _MET
        return self.function(*args)


def _key(args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """What decides what a call launches, the stream first; None where it is not to be recorded."""
    if tune.unsettled() or launch.listening() or device.pretending():
        return None
    parts: list[Any] = [0, tune.generation()]
    index = -2
    for value in args:
        if isinstance(value, Tensor):
            found = value.get_device()
            if index == -2:
                if found < 0 and not (value.device.type == "cpu" and env.interpreting()):
                    return None
                index = found
                if value.dtype is torch.float32:  # the one setting of torch's that kernels ask for, and only then
                    parts.append(torch.backends.cuda.matmul.allow_tf32)
            if found != index or value.data_ptr() % 16:
                return None
            parts += (value.dtype, value.shape, value.stride())
        elif isinstance(value, list):
            if value:
                return None
        else:
            parts.append(value)
    if index >= 0:
        if index != torch._C._cuda_getDevice():
            return None
        # Kernels that keep counters keep a row of them for each stream.
        parts[0] = torch._C._cuda_getCurrentRawStream(index)
    parts.append(index)
    return tuple(parts)


def _record(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, Any]:
    """The result of a call, and what it takes to have it again: a _Call, or a mark."""
    if not env.replaying() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return function(*args), _MET
    tape = _Tape(args)
    with tape, launch.listener(tape):
        result = function(*args)
    return result, tape.call(result)


class _Unfit(Exception):
    """A recording of this would not be the call."""


class _Call:
    """A recorded call: steps over slots, which hold the arguments and then what is allocated."""

    def __init__(self, steps: list[Any], given: int, slots: int, result: Any) -> None:
        self.steps = list(zip(steps, _dead(steps, given, result)))
        self.blank = [None] * slots
        self.result = result

    def __call__(self, args: tuple[Any, ...], stream: int) -> Any:
        slots: list[Any] = [*args, *self.blank]
        for step, dead in self.steps:
            step(slots, stream)
            for slot in dead:
                slots[slot] = None
        result = self.result
        return result.take(slots) if type(result) is _View else tuple([view.take(slots) for view in result])


class _View:
    """A tensor somewhere in the memory of a slot's."""

    def __init__(self, slot: int, offset: int, like: Tensor, base: Tensor) -> None:
        if like.element_size() != base.element_size() or offset % like.element_size():
            raise _Unfit
        self.slot, self.dtype = slot, like.dtype
        self.size, self.stride = tuple(like.shape), like.stride()
        self.offset = offset // like.element_size()
        alike = like.dtype == base.dtype and like.shape == base.shape and self.stride == base.stride()
        self.whole = alike and self.offset == 0

    def take(self, slots: list[Any]) -> Tensor:
        base = slots[self.slot]
        if self.whole:
            return base
        view = torch.as_strided(base, self.size, self.stride, base.storage_offset() + self.offset)
        return view if view.dtype == self.dtype else view.view(self.dtype)


class _Empty:
    """Memory without contents."""

    def __init__(self, slot: int, like: Tensor) -> None:
        self.slot, self.size, self.dtype, self.device = slot, tuple(like.shape), like.dtype, like.device
        self.stride = None if like.is_contiguous() else like.stride()

    def uses(self) -> list[int]:
        return [self.slot]

    def __call__(self, slots: list[Any], stream: int) -> None:
        if self.stride is None:
            slots[self.slot] = torch.empty(self.size, dtype=self.dtype, device=self.device)
        else:
            slots[self.slot] = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


class _Operation:
    """One of torch's operations; `slot` takes its result where that is new memory."""

    def __init__(self, function: Any, args: list[Any], kwargs: dict[str, Any], slot: int | None) -> None:
        self.function, self.args, self.kwargs, self.slot = function, args, kwargs, slot

    def uses(self) -> list[int]:
        used = [value.slot for value in (*self.args, *self.kwargs.values()) if isinstance(value, _View)]
        return used if self.slot is None else [*used, self.slot]

    def __call__(self, slots: list[Any], stream: int) -> None:
        args = [value.take(slots) if isinstance(value, _View) else value for value in self.args]
        kwargs = {name: value.take(slots) if isinstance(value, _View) else value for name, value in self.kwargs.items()}
        result = self.function(*args, **kwargs)
        if self.slot is not None:
            slots[self.slot] = result


class _Pointer:
    """Stands for a tensor in a descriptor: Triton asks it for its address alone."""

    __slots__ = ("address",)

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


def _described(like: tuple[dict[str, Any], type], base: Any) -> Any:
    """A tensor descriptor with these fields and of this kind, of other memory."""
    fields, kind = like
    made: Any = object.__new__(kind)
    made.__dict__.update(fields, base=base)
    return made


class _Launch:
    """A launch of machine code that is known to fit. `bound` has all arguments in order, with gaps for addresses."""

    def __init__(self, launched: launch.Launched | None, tape: _Tape) -> None:
        if launched is None:
            raise _Unfit
        self.launched = launched
        self.bound = list(launched.bound)
        self.addresses: list[tuple[int, int, int]] = []  # place, slot, bytes from the slot's tensor
        self.boxes: list[tuple[int, int, int]] = []  # the same for tensor descriptors
        self.views: list[tuple[int, _View]] = []  # under the interpreter, which wants tensors
        self.boxed: list[tuple[int, _View]] = []
        self.kept: list[Tensor] = []  # tables that outlive calls
        for place, value in enumerate(self.bound):
            if isinstance(value, Tensor):
                source = tape.source(value)
                if source is None:
                    self.kept.append(value)
                    self.bound[place] = value if launched.code is None else value.data_ptr()
                elif launched.code is None:
                    self.views.append((place, _View(*source, value, tape.tensors[source[0]])))
                else:
                    self.addresses.append((place, *source))
            elif isinstance(getattr(value, "base", None), Tensor):  # a tensor descriptor
                source = tape.source(value.base)
                if source is None:
                    raise _Unfit
                if launched.code is None:
                    self.boxed.append((place, _View(*source, value.base, tape.tensors[source[0]])))
                else:
                    self.boxes.append((place, *source))
                self.bound[place] = {**vars(value), "base": None}, type(value)
            elif isinstance(value, tuple) and any(isinstance(element, Tensor) for element in value):
                raise _Unfit

    def uses(self) -> list[int]:
        addressed = [slot for _, slot, _ in self.addresses + self.boxes]
        return addressed + [view.slot for _, view in self.views + self.boxed]

    def __call__(self, slots: list[Any], stream: int) -> None:
        bound = self.bound.copy()
        for place, slot, offset in self.addresses:
            bound[place] = slots[slot].data_ptr() + offset
        for place, slot, offset in self.boxes:
            bound[place] = _described(bound[place], _Pointer(slots[slot].data_ptr() + offset))
        for place, view in self.views:
            bound[place] = view.take(slots)
        for place, view in self.boxed:
            bound[place] = _described(bound[place], view.take(slots))
        self.launched.again(bound, stream)


class _Tape(TorchDispatchMode):
    """Writes down what a call does."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        super().__init__()
        self.given = len(args)
        self.tensors: dict[int, Tensor] = {slot: x for slot, x in enumerate(args) if isinstance(x, Tensor)}
        self.steps: list[Any] = []
        self.fit, self.heeding = True, True
        self.made: dict[int, int] = {}  # storage -> slot, of what was allocated since
        self.inputs: dict[int, list[int]] = {}
        for slot, x in self.tensors.items():
            self.inputs.setdefault(_memory(x), []).append(slot)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.fit and self.heeding:
            self._try(lambda: self._torch(func, args, kwargs, result))
        return result

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is done inside is no part of the call."""
        self.heeding = False
        try:
            yield
        finally:
            self.heeding = True

    def launched(self, step: launch.Launched | None) -> None:
        """A kernel was launched; without its particulars there is nothing to repeat."""
        if self.fit:
            self._try(lambda: self.steps.append(_Launch(step, self)))

    def call(self, result: Any) -> Any:
        """The recording, or the mark of a call that has none."""
        if self.fit and any(isinstance(step, _Launch) for step in self.steps):
            whole = result if isinstance(result, tuple) else (result,)
            try:
                views = tuple([self._view(one) for one in whole])
                return _Call(self.steps, self.given, len(self.made), views if isinstance(result, tuple) else views[0])
            except _Unfit:
                pass
        return _UNFIT

    def source(self, x: Tensor) -> tuple[int, int] | None:
        """(slot, bytes from its tensor) of a tensor's first element; None for one that is not of this call."""
        memory = _memory(x)
        if memory in self.made:
            slot = self.made[memory]
            return slot, x.data_ptr() - self.tensors[slot].data_ptr()
        sharing = self.inputs.get(memory)
        if sharing is None:
            return None
        if len(sharing) > 1:  # views of one tensor: which one is told by where it begins
            sharing = [slot for slot in sharing if self.tensors[slot].data_ptr() == x.data_ptr()]
            if len(sharing) != 1:
                raise _Unfit
        return sharing[0], x.data_ptr() - self.tensors[sharing[0]].data_ptr()

    def _try(self, note: Callable[[], None]) -> None:
        try:
            note()
        except _Unfit:
            self.fit = False
            self.steps, self.tensors, self.made, self.inputs = [], {}, {}, {}  # allocations must not outlive their use

    def _torch(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        if func in _ALLOCATIONS:
            self.steps.append(_Empty(self._keep(result), result))
            return
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if not isinstance(result, Tensor):
            raise _Unfit
        if not func._schema.is_mutable and _memory(result) in map(_memory, tensors):
            return  # a view, which whatever uses it is traced through
        if func not in _OPERATIONS and not (func is _aten.sum.dim_IntList and args[0].dtype is torch.float32):
            raise _Unfit  # a sum of other dtypes has the one that autocast wants
        places = [self._argument(value) for value in args]
        named = {name: self._argument(value) for name, value in kwargs.items()}
        self.steps.append(_Operation(func, places, named, None if func._schema.is_mutable else self._keep(result)))

    def _argument(self, value: Any) -> Any:
        return self._view(value) if isinstance(value, Tensor) else value

    def _view(self, x: Any) -> _View:
        source = self.source(x) if isinstance(x, Tensor) else None
        if source is None:
            raise _Unfit
        return _View(*source, x, self.tensors[source[0]])

    def _keep(self, x: Tensor) -> int:
        slot = self.made[_memory(x)] = self.given + len(self.made)
        self.tensors[slot] = x
        return slot


def _memory(x: Tensor) -> int:
    """Which storage a tensor lies in; it keeps its number for as long as it lives."""
    return x.untyped_storage()._cdata


def _dead(steps: list[Any], given: int, result: Any) -> list[tuple[int, ...]]:
    """For each step the slots of its own that nothing after it needs: their memory can serve what comes next."""
    views = (result,) if isinstance(result, _View) else result
    kept = {view.slot for view in views}
    last = {slot: number for number, step in enumerate(steps) for slot in step.uses()}
    return [
        tuple(slot for slot, at in last.items() if at == number and slot >= given and slot not in kept)
        for number in range(len(steps))
    ]
