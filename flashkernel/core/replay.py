"""The launch cache: records what a call launches, and replays it for other tensors of the same shapes.

Before it launches, a call checks its arguments, chooses a backend and launch configs, looks up tables, builds tensor
descriptors, and Triton looks up the compiled kernel. All of that depends on shapes, strides, dtypes and settings only,
and costs the host more time than small kernels cost the GPU. A call whose key (`LaunchCache.key`) was seen RECORD_AFTER
times is therefore recorded (core/recording.py): its allocations, launches and torch operations, in order, with every
tensor traced to an argument or an allocation. Later calls with that key run a generated function that does only these
steps, and launches through the driver (core/driver.py).

Two kinds of function have a launch cache. `replayed` wraps a public function: without gradients the whole call is
recorded; with gradients, the cache keeps the registered operator that the call ends in and where its arguments come
from. Where dispatch picks torch for a plain product, it keeps torch's function in the same way, with gradients and
without. A `KernelOp` (core/library.py) wraps the functions that launch kernels, forward and backward.

A function may be replayed if its launches do not depend on the values in tensors, which CUDA graphs require as well.
What follows from arguments alone and is shared by calls, such as the block ranges of a mask with tables, is looked up
again at each replay (core/derived.py). Some calls are uncacheable: those with two arguments that share elements,
or with torch operations that core/recording.py does not list. `statistics` counts them by reason, and
FLASHKERNEL_REPLAY=0 switches recording off.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashkernel.core import driver, env, replay_switch, tune
from flashkernel.core import recording as rec
from flashkernel.core.argument_types import type_checked
from flashkernel.core.arguments import shares_memory
from flashkernel.core.context import assigned

RECORD_AFTER = 64  # calls with one key: shapes of a single decoding step come once per layer, and are not worth it
RETRY_AFTER = 1024  # further calls, after a recording failed for one of TRANSIENT_REASONS
MAX_KEYS = 4096  # in one launch cache
# As a softmax scale in a tensor: the operator is given the number that it held.
UNUSED_TENSOR = "with gradients, it does not give its operator one of its tensors, whose value it may have read"
WRITTEN = ("out", "dz_out")  # keyword arguments that public functions write to
CONSTANT = "_flashkernel_constant"  # attribute of tensors that depend on a call's plain arguments only
_dispatch_modes = torch._C._len_torch_dispatch_stack
_functorch = torch._C._functorch.peek_interpreter_stack
_current_device = torch._C._cuda_getDevice if hasattr(torch._C, "_cuda_getDevice") else lambda: -1
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)
_allow_tf32 = torch._C._get_cublas_allow_tf32
_autocast, _grad_enabled = torch.is_autocast_enabled, torch.is_grad_enabled
_PLAIN = frozenset((int, float, bool, str, type(None), torch.dtype))
_PARAMETER = torch.nn.Parameter
_Function = TypeVar("_Function", bound=Callable[..., Any])
_caches: list[LaunchCache] = []
_extension: Any = None  # of core/native
_MISSING = object()  # what a LaunchCache of the extension returns for a call that it has no entry for


class Uncacheable:
    """The entry of a call that cannot be recorded."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


class LaunchCache:
    """The recorded calls of a function that takes tensors and plain values and launches kernels."""

    def __init__(
        self, function: Callable[..., Any], name: str, public: bool = False, torch_alone: bool = False
    ) -> None:
        self.function, self.name, self.public, self.torch_alone = function, name, public, torch_alone
        # By key: how often it was seen (int), a Recording, an OperatorCall, a _TorchCall, or Uncacheable.
        self.entries: dict[tuple[Any, ...], Any] = {}
        self.native: Any = None  # a LaunchCache of core/native: what it finds is not looked up here
        _caches.append(self)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.native is not None:
            result = self.native(args, kwargs)
            if result is not _MISSING:
                return result
        if (
            replay_switch.suspensions[0]
            or _dispatch_modes()
            or _functorch() is not None
            or forward_ad._current_level >= 0
        ):
            return self.function(*args, **kwargs)
        tensors: list[Tensor] = []
        try:
            key = self.key(args, kwargs, tensors)
            found: Any = 0 if key is None else self.entries.get(key, 0)
        except (TypeError, RuntimeError):  # an argument without a hash, or without memory, such as a sparse tensor
            key = None
        if key is None:
            return self.function(*args, **kwargs)
        kind = type(found)
        if _extension is not None and kind in _CONVERTED and found.program is None:
            return self._convert(args, kwargs, tensors, found)
        if kind is rec.Recording:
            return self.function(*args, **kwargs) if found.hooked() else found.run(tensors)
        if kind is OperatorCall or kind is _TorchCall:
            return found(tensors)
        if kind is int:
            if found < RECORD_AFTER:
                self._count(key, found)
            elif may_record():
                return self._record(key, tensors, args, kwargs)
        return self.function(*args, **kwargs)

    def key(self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> tuple[Any, ...] | None:
        """All that the launches of a call depend on; None for a call that has no key. Appends the call's tensors."""
        parts: list[Any] = [*kwargs]
        if not _collect(args, parts, tensors) or (kwargs and not _collect(kwargs.values(), parts, tensors)):
            return None
        if not tensors:
            return None
        index = tensors[0].get_device()
        if index < 0:
            if not env.interpreting() or tensors[0].device.type != "cpu":
                return None
        elif index != _current_device():
            return None
        else:  # a recording launches on one stream, and some kernels have counters for each stream
            parts.append(_current_stream(index))
        parts += (index, tune.generation[0], _allow_tf32())
        device = "cuda" if index >= 0 else "cpu"
        if _autocast(device):
            parts.append(torch.get_autocast_dtype(device))
        for name in WRITTEN:  # where a result and an operand share memory, the function itself says whether it may be
            written = kwargs.get(name)
            if isinstance(written, Tensor):
                parts += [written is tensor or shares_memory(written, tensor) for tensor in tensors]
        if self.public and _grad_enabled():
            parts += [tensor.requires_grad for tensor in tensors]
        return tuple(parts)

    def _count(self, key: tuple[Any, ...], seen: int) -> None:
        if seen == 0 and len(self.entries) >= MAX_KEYS:
            self.entries = {key: value for key, value in self.entries.items() if type(value) is not int}
            for oldest in list(self.entries)[: max(0, len(self.entries) - MAX_KEYS // 2)]:
                del self.entries[oldest]
        self.entries[key] = seen + 1

    def _record(
        self, key: tuple[Any, ...], tensors: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a call and record it; returns its result."""
        if env.replaying_in_cpp():
            _request_extension()
        entry: rec.Recording | OperatorCall | _TorchCall | Uncacheable
        trace = _CallTrace()
        if self.public and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            with assigned(_trace, trace):
                result = self.function(*args, **kwargs)
            entry = _torch_call(trace, tensors, result) or _operator_call(trace, tensors, result)
        else:
            with assigned(_trace, trace if self.public else None):
                result, recorded = rec.record(lambda: self.function(*args, **kwargs), tensors, not self.torch_alone)
            if isinstance(recorded, str):
                entry = _torch_call(trace, tensors, result) or Uncacheable(recorded)
            else:
                entry = recorded
        retry = isinstance(entry, Uncacheable) and entry.reason in rec.TRANSIENT_REASONS
        self.entries[key] = -RETRY_AFTER if retry else entry
        return result

    def _convert(self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor], found: Any) -> Any:
        """Run a call and give the extension its entry; returns the call's result."""
        from flashkernel.core.native.describe import program
        from flashkernel.core.native.operator_call import CannotConvert, first_call

        if self.native is None:
            self.native = _extension.LaunchCache(self.public, WRITTEN, _MISSING)
        elif len(self.native) >= MAX_KEYS:
            self.forget_programs()
        if type(found) is rec.Recording:
            if found.hooked():
                return self.function(*args, **kwargs)
            found.program = program(_extension, found)
            shape = isinstance(found.result, tuple), found.result is None
            self.native.insert_program(args, kwargs, found.program, *shape)
            return found.run(tensors)
        if type(found) is OperatorCall and found.find_recording(tensors) is not None:
            try:
                found.program, result = first_call(_extension, found, tensors)
            except CannotConvert as error:
                found.program = str(error)
            else:
                self.native.insert_operator(args, kwargs, found.program)
                return result
        elif type(found) is _TorchCall:
            found.program = found
            self.native.insert_function(args, kwargs, found)
        return found(tensors)

    def forget_programs(self) -> None:
        """Forget what the extension has of this function."""
        if self.native is not None:
            self.native.clear()
        for entry in self.entries.values():
            if type(entry) in _CONVERTED:
                entry.program = None

    def clear(self) -> None:
        """Forget all calls."""
        self.forget_programs()
        self.entries.clear()

    def find(self, args: tuple[Any, ...]) -> rec.Recording | None:
        """The recording of a call, if there is one."""
        key = self.key(args, {}, [])
        found = None if key is None else self.entries.get(key)
        return found if type(found) is rec.Recording else None


def _collect(values: Any, parts: list[Any], tensors: list[Tensor]) -> bool:
    """Append the key of each argument to `parts`, and the tensors; False if an argument has no key."""
    for value in values:
        kind = type(value)
        if kind is Tensor or kind is _PARAMETER:
            if value.is_neg():
                return False
            tensors.append(value)
            # Contiguous tensors may differ in the strides of dims of size 1, which no kernel uses.
            strides = value.is_contiguous() or value.stride()
            parts += (value.dtype, value.shape, strides, value.data_ptr() & 15 == 0, value.get_device())
        elif kind in _PLAIN:
            parts.append(value)
        elif kind is tuple or kind is list or kind is torch.Size:
            parts.append(len(value))
            if not _collect(value, parts, tensors):
                return False
        else:
            key = getattr(value, "cache_key", None)
            if key is None:
                inside = getattr(value, "cache_parts", None)  # an object that holds tensors
                if inside is None or not _collect(inside, parts, tensors):
                    return False
                key = kind
            parts.append(key)
    return True


@contextmanager
def recorded_after(calls: int) -> Iterator[None]:
    """Inside, a call is recorded when its key was seen so often, in all threads."""
    global RECORD_AFTER
    before, RECORD_AFTER = RECORD_AFTER, calls
    try:
        yield
    finally:
        RECORD_AFTER = before


def _request_extension() -> None:
    """Use the extension if it was built."""
    global _extension
    from flashkernel.core.native import build

    build.request()
    _extension = build.extension()


def may_record() -> bool:
    """Whether calls may be recorded now."""
    if not env.replaying() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return False
    if env.interpreting():
        return True
    reason = driver.unavailable()
    if reason is not None:
        _warn(reason)
    return reason is None


@cache
def _warn(reason: str) -> None:
    warnings.warn(f"flashkernel: calls are not recorded, so each costs the host more: {reason}", stacklevel=2)


def replayed(function: _Function) -> _Function:
    """Give a public function a launch cache, and a check of its arguments' types where a call is not replayed.
    torch.compile traces the function itself."""
    launch_cache = LaunchCache(type_checked(function), function.__name__, public=True)
    run = launch_cache.__call__

    @wraps(function)
    def entry(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        return run(args, kwargs)

    entry.launch_cache = launch_cache  # type: ignore[attr-defined]
    return entry  # type: ignore[return-value]


@dataclass
class _CallTrace:
    """What a public call did: the operators that it applied through autograd, as (a KernelOp, its arguments, its
    outputs), torch's functions that it called through `call_torch`, likewise, and what it looked up (core/derived.py),
    as (function, its tensors, its results)."""

    applied: list[tuple[Any, tuple[Any, ...], Any]] = field(default_factory=list)
    torch_calls: list[tuple[Callable[..., Tensor], tuple[Any, ...], Tensor]] = field(default_factory=list)
    derived: list[tuple[Callable[..., Any], Sequence[Tensor], Sequence[Tensor]]] = field(default_factory=list)


_trace: ContextVar[_CallTrace | None] = ContextVar("flashkernel_call_trace", default=None)


def notify_applied(op: Any, args: tuple[Any, ...], outputs: Any) -> None:
    """Report that an operator was applied through autograd."""
    trace = _trace.get()
    if trace is not None:
        trace.applied.append((op, args, outputs))


def call_torch(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """Returns `function(*args)`: a function of torch that may be all that a public call does with its arguments. Its
    later calls then go there directly."""
    result = function(*args)
    if not torch.compiler.is_compiling():
        trace = _trace.get()
        if trace is not None:
            trace.torch_calls.append((function, args, result))
    return result


def notify_derived(function: Callable[..., Any], tensors: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    """Report that `function(*tensors)` was looked up, or made."""
    trace = _trace.get()
    if trace is not None:
        trace.derived.append((function, tensors, results))


_DerivedArgument = tuple[int, Callable[..., Any], list[int], int]


class OperatorCall:
    """A call with gradients that applies one operator.

    `template` has an entry for each argument of the operator: (True, index of one of the call's tensors), or (False,
    the value). `derived` are the arguments that are looked up, or lists of the call's tensors: (index of the argument,
    function, indices of the tensors that it takes, index of its result). `returned` are the indices of the outputs that
    the call returns; None: all of them, as they are.
    """

    def __init__(
        self, op: Any, template: list[tuple[bool, Any]], derived: list[_DerivedArgument],
        returned: tuple[int, ...] | None,
    ) -> None:  # fmt: skip
        self.op, self.template, self.derived, self.returned, self.apply = op, template, derived, returned, op.apply
        looked_up = [argument for argument, *_ in derived]
        self.tensors = [index for index, (from_call, value) in enumerate(template)
                        if from_call or isinstance(value, Tensor) or index in looked_up]  # fmt: skip
        self.lists = any(function is as_list for _, function, _, _ in derived)
        self.recording: rec.Recording | None = None
        self.program: Any = None  # an OperatorCall of core/native; a str: the reason why there is none

    def arguments(self, tensors: list[Tensor]) -> list[Any]:
        """The operator's arguments in a call."""
        args = [tensors[value] if from_call else value for from_call, value in self.template]
        for argument, function, given, result in self.derived:
            args[argument] = function(*[tensors[index] for index in given])[result]
        return args

    def find_recording(self, tensors: list[Tensor]) -> rec.Recording | None:
        """The recording of the operator's forward pass, if there is one that may be replayed."""
        if self.recording is None:
            self.recording = self.op.forward.find(tuple(self.arguments(tensors)))
        return None if self.recording is None or self.recording.hooked() else self.recording

    def __call__(self, tensors: list[Tensor]) -> Any:
        args = self.arguments(tensors)
        recording = self.recording
        if recording is None:
            recording = self.recording = self.op.forward.find(tuple(args))
        if recording is None or recording.hooked():
            outputs = self.apply(*args, None)
        else:
            given = [args[index] for index in self.tensors]
            if self.lists:
                given = [x for one in given for x in (one if type(one) is list else (one,))]
            return self.apply(*args, (recording, given, self.returned))
        returned = self.returned
        if returned is None:
            return outputs
        return outputs[returned[0]] if len(returned) == 1 else tuple([outputs[index] for index in returned])


def _operator_call(trace: _CallTrace, tensors: list[Tensor], result: Any) -> OperatorCall | Uncacheable:
    """The entry of a call with gradients on `tensors` that did this and returned `result`."""
    if len(trace.applied) != 1:
        return Uncacheable(f"with gradients it applies {len(trace.applied)} operators, not one")
    op, args, outputs = trace.applied[0]
    indices = {id(tensor): index for index, tensor in enumerate(tensors)}
    if len(indices) < len(tensors):  # one tensor was passed twice; another call of these shapes may pass two
        return Uncacheable(rec.SHARED_MEMORY)
    template: list[tuple[bool, Any]] = []
    derived: list[_DerivedArgument] = []
    for value in args:
        looked_up = _derivation(value, trace, indices)
        if looked_up is not None:
            derived.append((len(template), *looked_up))
            template.append((False, None))
        elif isinstance(value, list) and any(isinstance(element, Tensor) for element in value):
            if not all(id(element) in indices for element in value):
                return Uncacheable("with gradients, it gives its operator a list of tensors that are not its arguments")
            derived.append((len(template), as_list, [indices[id(element)] for element in value], 0))
            template.append((False, None))
        elif not isinstance(value, Tensor):
            template.append((False, value))
        elif id(value) in indices:
            template.append((True, indices[id(value)]))
        elif getattr(value, CONSTANT, False):
            template.append((False, value))
        else:
            return Uncacheable("with gradients, it gives its operator a tensor that is none of its arguments")
    used = {value for from_call, value in template if from_call}.union(*[given for _, _, given, _ in derived])
    if len(used) < len(tensors):
        return Uncacheable(UNUSED_TENSOR)
    if result is outputs:
        return OperatorCall(op, template, derived, None)
    output_indices = {id(output): index for index, output in enumerate(outputs)} if isinstance(outputs, tuple) else {}
    results = result if isinstance(result, tuple) else (result,)
    if any(id(one) not in output_indices for one in results):
        return Uncacheable("with gradients, its result is computed from the operator's outputs")
    if isinstance(result, tuple) and len(result) == 1:
        return Uncacheable("with gradients, its result is a tuple of one")
    return OperatorCall(op, template, derived, tuple([output_indices[id(one)] for one in results]))


class _TorchCall:
    """A call that is a call of one of torch's functions on its own tensors, such as `F.linear`.

    `template` has an entry for each argument of the function: (True, index of one of the call's tensors), or (False,
    the value).
    """

    def __init__(self, function: Callable[..., Tensor], template: list[tuple[bool, Any]]) -> None:
        self.function, self.template = function, template
        self.program: Any = None

    def __call__(self, tensors: list[Tensor]) -> Tensor:
        return self.function(*[tensors[value] if from_call else value for from_call, value in self.template])


_CONVERTED = frozenset((rec.Recording, OperatorCall, _TorchCall))  # entries that the extension may have


def _torch_call(trace: _CallTrace, tensors: list[Tensor], result: Any) -> _TorchCall | None:
    """The entry of a call on `tensors` that did this and returned `result`; None if it did more than call torch."""
    if trace.applied or trace.derived or len(trace.torch_calls) != 1:
        return None
    function, args, found = trace.torch_calls[0]
    indices = {id(tensor): index for index, tensor in enumerate(tensors)}
    given = [value for value in args if isinstance(value, Tensor)]
    if result is not found or len(indices) < len(tensors) or {id(value) for value in given} != set(indices):
        return None
    return _TorchCall(
        function,
        [(True, indices[id(value)]) if isinstance(value, Tensor) else (False, value) for value in args],
    )


def as_list(*tensors: Tensor) -> tuple[list[Tensor]]:
    """An argument that is a list of the call's tensors, such as the tables of a mask."""
    return (list(tensors),)


def _derivation(
    value: Any, trace: _CallTrace, indices: dict[int, int]
) -> tuple[Callable[..., Any], list[int], int] | None:
    """(function, indices of the call's tensors that it takes, index of its result) of an argument that was looked up
    from them; None for any other."""
    if isinstance(value, Tensor) and id(value) not in indices:
        for function, given, results in trace.derived:
            for number, one in enumerate(results):
                if one is value and all(id(x) in indices for x in given):
                    return function, [indices[id(x)] for x in given], number
    return None


def disabled_reason() -> str | None:
    """The reason why no calls are recorded here; None where they are."""
    if not env.replaying():
        return "FLASHKERNEL_REPLAY is 0"
    if env.interpreting():
        return None
    return driver.unavailable() if torch.cuda.is_available() else "there is no GPU to launch on"


def statistics() -> list[tuple[str, int, dict[str, int]]]:
    """For each function that was called: its name, the number of its recorded calls, and the number of its uncacheable
    calls by reason."""
    lines = []
    for launches in _caches:
        if launches.entries:
            reasons: dict[str, int] = {}
            for entry in launches.entries.values():
                if isinstance(entry, Uncacheable):
                    reasons[entry.reason] = reasons.get(entry.reason, 0) + 1
            recorded = sum(not isinstance(entry, (int, Uncacheable)) for entry in launches.entries.values())
            lines.append((launches.name, recorded, reasons))
    return lines
