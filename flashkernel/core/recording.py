"""A recording of a call: what it allocated, launched and asked of torch, as a generated function."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_void_p
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flashkernel.core import driver, launch
from flashkernel.core.driver import Launched, PreparedLaunch

_aten = torch.ops.aten
_ALLOCATIONS = {
    _aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default, _aten.new_empty.default,
    _aten.new_empty_strided.default,
}  # fmt: skip
# Whose results depend on their arguments alone, not on autocast or other settings.
_OPERATIONS = {
    _aten.zero_.default, _aten.fill_.Scalar, _aten.copy_.default, _aten.clone.default, _aten._to_copy.default,
    _aten.zeros.default, _aten.new_zeros.default, _aten.zeros_like.default, _aten.full.default, _aten.new_full.default,
    _aten.mm.default, _aten.mm.out, _aten.addmm.default, _aten.addmm.out, _aten.addmm_.default, _aten.ne.Scalar,
}  # fmt: skip
_SUMS = {_aten.sum.dim_IntList, _aten.sum.default}
_METHODS = {_aten.zero_.default: "zero_", _aten.fill_.Scalar: "fill_", _aten.copy_.default: "copy_"}
SHARED_MEMORY = "two of its arguments begin at the same address"
PASSING = {SHARED_MEMORY}  # reasons that another call of the same shapes need not have


class CannotRecord(Exception):
    """A recording of this would not be the call; says why."""


def record(function: Callable[[], Any], tensors: Sequence[Tensor]) -> tuple[Any, Recording | str]:
    """The result of a call, and its recording over `tensors`, its arguments, or the reason why there is none."""
    tape = _Tape(tensors)
    with tape, launch.listener(tape):
        result = function()
    return result, tape.recording(result)


class Recording:
    """A recorded call. `run(tensors)` gives its result for other tensors of the same shapes, strides and dtypes."""

    def __init__(self, steps: list[Any], given: Sequence[Tensor], result: Any) -> None:
        from triton import knobs

        self._knobs = knobs.runtime
        self.steps = list(zip(steps, _dead(steps, len(given), result)))
        out = _Writer(given[0].get_device())
        kept = [tensor for step in steps if isinstance(step, _Launch) for tensor in step.kept]
        if kept and out.index >= 0:
            out.line(f"if capturing(): pin({out.name(kept, 'kept')})")
        for slot in sorted({slot for step in steps for slot in step.uses()} | {view.slot for view in _views(result)}):
            if slot < len(given):
                out.line(f"v{slot} = tensors[{slot}]")
        _shape_results(steps, result)
        out.dropped = _of_nothing(steps, result) if out.index >= 0 else set()
        for step, dead in self.steps:
            step.emit(out)
            gone = [f"v{slot}" for slot in dead if slot not in out.dropped]
            if gone:
                out.line(f"del {', '.join(gone)}")
        parts = [view.expression(len(given)) for view in _views(result)]
        if result is not None:
            out.line(f"return ({', '.join(parts)},)" if isinstance(result, tuple) else f"return {parts[0]}")
        self.source = out.source()
        self.run: Callable[[Sequence[Tensor]], Any] = out.function(self.source)

    def hooked(self) -> bool:
        """Whether a profiler has hooked Triton's launches, which a recording would pass by."""
        knobs = self._knobs
        try:
            return bool(knobs.launch_enter_hook.calls or knobs.launch_exit_hook.calls)
        except AttributeError:  # a function was put in the place of a list of hooks
            return knobs.launch_enter_hook is not None or knobs.launch_exit_hook is not None


def _views(result: _View | tuple[_View, ...] | None) -> tuple[_View, ...]:
    return result if isinstance(result, tuple) else () if result is None else (result,)


def _shape_results(steps: list[Any], result: Any) -> None:
    """Allocate an output in the shape in which it is returned, where that is another view of all of it."""
    made = {step.slot: step for step in steps if isinstance(step, _Empty)}
    for view in _views(result):
        step = made.get(view.slot)
        alone = sum(other.slot == view.slot for other in _views(result)) == 1
        used = any(isinstance(step, _Operation) and view.slot in step.uses() for step in steps)
        if step is None or view.whole or not alone or used or view.offset or step.dtype != view.dtype:
            continue
        same = torch.Size(step.size).numel() == torch.Size(view.size).numel()
        if same and _contiguous(step.size, step.stride) and _contiguous(view.size, view.stride):
            step.size, step.stride, view.whole = view.size, view.stride, True


def _of_nothing(steps: list[Any], result: Any) -> set[int]:
    """Slots of allocations without elements that only launches take: a null pointer will do."""
    needed = {view.slot for view in _views(result)}
    needed |= {slot for step in steps if not isinstance(step, (_Empty, _Launch)) for slot in step.uses()}
    return {step.slot for step in steps if isinstance(step, _Empty) and 0 in step.size} - needed


def _contiguous(size: Sequence[int], stride: Sequence[int]) -> bool:
    step = 1
    for length, found in zip(reversed(size), reversed(stride)):
        if length != 1 and found != step:
            return False
        step *= length
    return True


class _Writer:
    """The source of a generated function, and the names it uses."""

    def __init__(self, index: int) -> None:
        self.index = index  # of the GPU; -1: tensors are on the CPU, and kernels under Triton's interpreter
        self.lines: list[str] = []
        self.dropped: set[int] = set()  # slots that are null pointers
        self.names: dict[str, Any] = {"as_strided": torch.as_strided, "lock": threading.RLock(), "void": c_void_p}
        if index >= 0:
            from torch._C._dynamo.guards import _empty_strided_cuda  # type: ignore[attr-defined]

            from flashkernel.core.tables import pin

            self.names.update(
                empty=_empty_strided_cuda, launch=driver.launch(), pin=pin,
                capturing=torch.cuda.is_current_stream_capturing, replace_address=driver.replace_address(),
            )  # fmt: skip
            self.stream = torch._C._cuda_getCurrentRawStream(index)
        else:
            self.names["empty"] = lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype)

    def line(self, text: str) -> None:
        self.lines.append(text)

    def name(self, value: Any, hint: str) -> str:
        """A name for a value that the source cannot spell."""
        made = f"{hint}{len(self.names)}"
        self.names[made] = value
        return made

    def source(self) -> str:
        return "def run(tensors):\n" + "".join(f"    {line}\n" for line in self.lines)

    def function(self, source: str) -> Callable[[Sequence[Tensor]], Any]:
        exec(compile(source, "<flashkernel recording>", "exec"), self.names)
        return self.names["run"]


class _View:
    """A tensor somewhere in the memory of a slot's."""

    def __init__(self, slot: int, offset: int, like: Tensor, base: Tensor) -> None:
        if like.element_size() != base.element_size() or offset % like.element_size():
            raise CannotRecord("memory is read in another width than it was allocated in")
        self.slot, self.dtype = slot, like.dtype
        self.size, self.stride = tuple(like.shape), like.stride()
        self.offset = offset // like.element_size()
        self.cast = like.dtype != base.dtype
        self.whole = not (self.cast or self.offset or like.shape != base.shape or self.stride != base.stride())

    def expression(self, given: int) -> str:
        """Source for this view; `given` slots are arguments, which may begin anywhere in their storage."""
        if self.whole:
            return f"v{self.slot}"
        offset = f"v{self.slot}.storage_offset() + {self.offset}" if self.slot < given else str(self.offset)
        text = f"as_strided(v{self.slot}, {self.size}, {self.stride}, {offset})"
        return f"{text}.view({_spell(self.dtype)})" if self.cast else text


def _spell(dtype: torch.dtype) -> str:
    return f"__import__('torch').{str(dtype).removeprefix('torch.')}"


class _Empty:
    """Memory without contents."""

    def __init__(self, slot: int, like: Tensor) -> None:
        self.slot, self.size, self.stride, self.dtype = slot, tuple(like.shape), like.stride(), like.dtype

    def uses(self) -> list[int]:
        return [self.slot]

    def emit(self, out: _Writer) -> None:
        if self.slot in out.dropped:
            return
        out.line(f"v{self.slot} = empty({self.size}, {self.stride}, {out.name(self.dtype, 'dtype')})")


class _Operation:
    """One of torch's operations; `slot` takes its result where that is new memory."""

    def __init__(self, function: Any, args: list[Any], kwargs: dict[str, Any], slot: int | None, given: int) -> None:
        self.function, self.args, self.kwargs, self.slot, self.given = function, args, kwargs, slot, given

    def uses(self) -> list[int]:
        used = [value.slot for value in (*self.args, *self.kwargs.values()) if isinstance(value, _View)]
        return used if self.slot is None else [*used, self.slot]

    def emit(self, out: _Writer) -> None:
        def spell(value: Any) -> str:
            return value.expression(self.given) if isinstance(value, _View) else out.name(value, "value")

        args = [spell(value) for value in self.args]
        args += [f"{name}={spell(value)}" for name, value in self.kwargs.items()]
        method = _METHODS.get(self.function)
        if method is not None and not self.kwargs:
            out.line(f"{args[0]}.{method}({', '.join(args[1:])})")
            return
        target = "" if self.slot is None else f"v{self.slot} = "
        out.line(f"{target}{out.name(self.function, 'operation')}({', '.join(args)})")


class _Launch:
    """A launch of machine code that is known to fit, with every tensor traced to a slot."""

    def __init__(self, launched: Launched, tape: _Tape) -> None:
        self.launched, self.given = launched, tape.given
        self.sources: dict[int, tuple[int, int]] = {}  # place of a parameter -> slot, bytes from the slot's tensor
        self.views: dict[int, _View] = {}  # under the interpreter, which wants tensors
        self.kept: list[Tensor] = []  # tables that outlive calls
        for place, (_, value) in enumerate(launched.params):
            tensor = getattr(value, "base", None) if isinstance(value, driver.TensorMap) else value
            if not isinstance(tensor, Tensor):
                continue
            source = tape.source(tensor)
            if source is None:
                self.kept.append(tensor)
            else:
                self.sources[place] = source
                if launched.rerun is not None:
                    self.views[place] = _View(*source, tensor, tape.tensors[source[0]])

    def uses(self) -> list[int]:
        return [slot for slot, _ in self.sources.values()]

    def emit(self, out: _Writer) -> None:
        if self.launched.rerun is not None:
            values = [
                self.views[place].expression(self.given) if place in self.views else out.name(value, "value")
                for place, (_, value) in enumerate(self.launched.params)
            ]
            out.line(f"{out.name(self.launched.rerun, 'rerun')}(({', '.join(values)},))")
            return
        sources = {place: source for place, source in self.sources.items() if source[0] not in out.dropped}
        moving = [place for place in sources if self.launched.params[place][0] == "P"]
        fixed: dict[int, int] = {}
        for place, (kind, value) in enumerate(self.launched.params):
            if kind == "P" and place not in sources:
                fixed[place] = 0 if value is None else value.data_ptr() if isinstance(value, Tensor) else value
            elif kind == "M":
                fixed[place] = value.base.data_ptr()
        prepared = PreparedLaunch(self.launched, out.stream, moving, fixed)
        named = out.name(prepared, "kernel")
        out.names.update({
            f"{named}_pack": prepared.pack, f"{named}_buffer": prepared.buffer, f"{named}_config": prepared.config,
            f"{named}_function": prepared.function, f"{named}_params": prepared.params,
            f"{named}_words": prepared.words,
        })  # fmt: skip
        addresses = {place: _address(*source) for place, source in sources.items()}
        maps = [place for place in prepared.maps if place in addresses]
        opaque = [place for place in maps if place not in prepared.map_words]
        for place in opaque:
            out.line(f"a{place} = void({addresses[place]})")
        listed = ", ".join(addresses[place] for place in moving)
        out.line("with lock:")
        if moving:
            out.line(f"    {named}_pack({named}_buffer, 0, {listed})")
        for place in maps:
            if place in prepared.map_words:
                out.line(f"    {named}_words[{prepared.map_words[place]}] = {addresses[place]}")
        for place in opaque:
            out.line(f"    replace_address({out.name(prepared.maps[place], 'map')}, a{place})")
        out.line(f"    status = launch({named}_config, {named}_function, {named}_params, None)")
        out.line(f"    if status: {named}.failed(status)")


class _Written:
    """Autograd learns that a kernel has written to an argument."""

    def __init__(self, view: _View) -> None:
        self.view = view

    def uses(self) -> list[int]:
        return [self.view.slot]

    def emit(self, out: _Writer) -> None:
        out.names["increment_version"] = torch.autograd.graph.increment_version
        out.line(f"if not v{self.view.slot}.is_inference(): increment_version(v{self.view.slot})")


def _address(slot: int, offset: int) -> str:
    return f"v{slot}.data_ptr() + {offset}" if offset else f"v{slot}.data_ptr()"


class _Tape(TorchDispatchMode):
    """Writes down what a call does."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        self.arguments = given
        self.given = len(given)
        self.tensors: dict[int, Tensor] = dict(enumerate(given))
        self.steps: list[Any] = []
        self.reason: str | None = None  # why there is no recording
        self.paused = False
        self.made: dict[int, int] = {}  # storage -> slot, of what was allocated since
        self.inputs: dict[int, list[int]] = {}
        for slot, x in self.tensors.items():
            self.inputs.setdefault(_memory(x), []).append(slot)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.reason is None and not self.paused:
            self._try(lambda: self._torch(func, args, kwargs, result))
        return result

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What torch is asked inside is no part of the call."""
        self.paused = True
        try:
            yield
        finally:
            self.paused = False

    def launched(self, launched: Launched | str) -> None:
        """A kernel was launched; a string says why that cannot be repeated."""
        if self.reason is None:
            self._try(lambda: self.steps.append(self._launch(launched)))

    def written(self, x: Tensor) -> None:
        """An argument was written to by a kernel, which autograd was told of."""
        if self.reason is None:
            self._try(lambda: self.steps.append(_Written(self._view(x))))

    def _launch(self, launched: Launched | str) -> _Launch:
        if isinstance(launched, str):
            raise CannotRecord(launched)
        return _Launch(launched, self)

    def recording(self, result: Any) -> Recording | str:
        """The recording, or the reason why there is none."""
        if self.reason is None and not any(isinstance(step, _Launch) for step in self.steps):
            self.reason = "it launches no kernel of this library"
        if self.reason is None:
            try:
                if result is None:
                    return Recording(self.steps, self.arguments, None)
                views = tuple([self._view(one) for one in (result if isinstance(result, tuple) else (result,))])
                return Recording(self.steps, self.arguments, views if isinstance(result, tuple) else views[0])
            except (CannotRecord, RuntimeError) as error:  # RuntimeError: the driver refuses a tensor map
                self.reason = str(error)
        return self.reason

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
                raise CannotRecord(SHARED_MEMORY)
        return sharing[0], x.data_ptr() - self.tensors[sharing[0]].data_ptr()

    def _try(self, note: Callable[[], None]) -> None:
        try:
            note()
        except CannotRecord as error:
            self.reason = str(error)
            self.steps, self.tensors, self.made, self.inputs = [], {}, {}, {}  # allocations must not outlive their use

    def _torch(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        if func in _ALLOCATIONS:
            if result.device != self.arguments[0].device:
                raise CannotRecord(f"it allocates on {result.device}")
            self.steps.append(_Empty(self._keep(result), result))
            return
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        made = result if isinstance(result, (tuple, list)) else (result,)
        if not all(isinstance(one, Tensor) for one in made):
            raise CannotRecord(f"it asks torch for {func}")
        given = set(map(_memory, tensors))
        if not func._schema.is_mutable and all(_memory(one) in given for one in made):
            return  # views, which whatever uses them is traced through
        exact = func in _SUMS and args[0].dtype in (torch.float32, torch.bool)  # else autocast decides on the dtype
        if func not in _OPERATIONS and not exact:
            raise CannotRecord(f"it asks torch for {func}")
        places = [self._argument(value) for value in args]
        named = {name: self._argument(value) for name, value in kwargs.items()}
        slot = None if func._schema.is_mutable else self._keep(result)
        self.steps.append(_Operation(func, places, named, slot, self.given))

    def _argument(self, value: Any) -> Any:
        return self._view(value) if isinstance(value, Tensor) else value

    def _view(self, x: Any) -> _View:
        source = self.source(x) if isinstance(x, Tensor) else None
        if source is None:
            raise CannotRecord("its result or an operand is a tensor from outside the call")
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
    kept = {view.slot for view in _views(result)}
    last = {slot: number for number, step in enumerate(steps) for slot in step.uses()}
    return [
        tuple(slot for slot, at in last.items() if at == number and slot >= given and slot not in kept)
        for number in range(len(steps))
    ]
