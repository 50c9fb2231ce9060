"""What a call launches, recorded, and launched again for other tensors of the same shapes.

On the way to its launches a call checks its arguments, chooses a backend and configs, looks up tables and describes
tiles, and Triton works out which machine code fits. All of that follows from shapes, strides, dtypes and settings, and
takes the host longer than small kernels take the GPU. So once such arguments have come often enough (RECORD_AFTER), a
call is recorded: what it allocates, launches and asks of torch, in order, with every tensor traced to an argument or an
allocation. From then on a generated function does only that, and launches by the driver (core/driver.py).

There is one mechanism with two entrances. `replayed` wraps a public function: without gradients the whole call is
recorded; with gradients it remembers which registered operator the call ends in, and with which arguments. `CallCache`
wraps the launching function of an operator, forward or backward.

A function qualifies if it never looks at what tensors hold, as none that a CUDA graph can capture does. Calls stay as
they are where a recording would not tell the whole story: tables of a mask, which come as lists; arguments that lie in
the same memory; operations of torch's beyond the few below. `report` lists them with their reasons, and
FLASHKERNEL_REPLAY=0 switches recording off.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashkernel.core import driver, env, state, tune
from flashkernel.core import recording as rec

RECORD_AFTER = 64  # calls: decoding changes the shapes of every step, and no step has that many layers
RETRY_AFTER = 1024  # further calls, where a recording failed for a reason that others need not have
MOST_CALLS = 4096  # kept for each function
CONSTANT = "_flashkernel_constant"  # attribute of tensors that follow from a call's plain arguments alone
_dispatch_modes = torch._C._len_torch_dispatch_stack
_functorch = torch._C._functorch.peek_interpreter_stack
_current_device = torch._C._cuda_getDevice if hasattr(torch._C, "_cuda_getDevice") else lambda: -1
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)
_allow_tf32 = torch._C._get_cublas_allow_tf32
_autocast, _grad_enabled = torch.is_autocast_enabled, torch.is_grad_enabled
_PLAIN = frozenset((int, float, bool, str, type(None), torch.dtype))
_PARAMETER = torch.nn.Parameter
_Function = TypeVar("_Function", bound=Callable[..., Any])
_caches: list[CallCache] = []


class Uncacheable:
    """The mark of a call that cannot be recorded."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


class CallCache:
    """A function of tensors and plain values that launches kernels, with the calls it has recorded."""

    def __init__(self, function: Callable[..., Any], name: str, public: bool = False) -> None:
        self.function, self.name, self.public = function, name, public
        self.calls: dict[tuple[Any, ...], Any] = {}  # how often it was seen, a recording, or why there is none
        _caches.append(self)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if state.suspensions or _dispatch_modes() or _functorch() is not None or forward_ad._current_level >= 0:
            return self.function(*args, **kwargs)
        tensors: list[Tensor] = []
        key = self.key(args, kwargs, tensors)
        if key is None:
            return self.function(*args, **kwargs)
        try:
            found = self.calls.get(key, 0)
        except TypeError:  # an argument without a hash
            return self.function(*args, **kwargs)
        kind = type(found)
        if kind is rec.Recording:
            return self.function(*args, **kwargs) if found.hooked() else found.run(tensors)
        if kind is _Applied:
            return found(tensors)
        if kind is int:
            if found < RECORD_AFTER:
                self._count(key, found)
            elif _may_record():
                return self._record(key, tensors, args, kwargs)
        return self.function(*args, **kwargs)

    def key(self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> tuple[Any, ...] | None:
        """What decides what a call launches; None where that cannot be said. Appends the call's tensors."""
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
        else:  # kernels that keep counters keep a row of them for each stream
            parts.append(_current_stream(index))
        parts += (index, tune.generation, _allow_tf32())
        device = "cuda" if index >= 0 else "cpu"
        if _autocast(device):
            parts.append(torch.get_autocast_dtype(device))
        if self.public and _grad_enabled():
            parts += [tensor.requires_grad for tensor in tensors]
        return tuple(parts)

    def _count(self, key: tuple[Any, ...], seen: int) -> None:
        if seen == 0 and len(self.calls) >= MOST_CALLS:
            self.calls = {key: value for key, value in self.calls.items() if type(value) is not int}
            for oldest in list(self.calls)[: max(0, len(self.calls) - MOST_CALLS // 2)]:
                del self.calls[oldest]
        self.calls[key] = seen + 1

    def _record(
        self, key: tuple[Any, ...], tensors: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The result of a call, which is recorded as well."""
        if self.public and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            with _watching() as seen:
                result = self.function(*args, **kwargs)
            self.calls[key] = _applied(seen, tensors, result)
        else:
            result, made = rec.record(lambda: self.function(*args, **kwargs), tensors)
            self.calls[key] = Uncacheable(made) if isinstance(made, str) else made
        mark = self.calls[key]
        if isinstance(mark, Uncacheable) and mark.reason in rec.PASSING:
            self.calls[key] = -RETRY_AFTER
        return result

    def find(self, args: tuple[Any, ...]) -> rec.Recording | None:
        """The recording of a call, if there is one."""
        key = self.key(args, {}, [])
        found = None if key is None else self.calls.get(key)
        return found if type(found) is rec.Recording else None


def _collect(values: Any, parts: list[Any], tensors: list[Tensor]) -> bool:
    """Append what calls are told apart by, and the tensors; False where an argument cannot be told apart."""
    for value in values:
        kind = type(value)
        if kind is Tensor or kind is _PARAMETER:
            tensors.append(value)
            # Strides along single elements, which contiguous tensors may differ in, are never taken.
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
                return False
            parts.append(key)
    return True


def _may_record() -> bool:
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
    """Record the calls of a public function that come again. It is the same function under torch.compile."""
    calls = CallCache(function, function.__name__, public=True)

    run = calls.__call__

    @wraps(function)
    def entry(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        return run(args, kwargs)

    entry.calls = calls  # type: ignore[attr-defined]
    return entry  # type: ignore[return-value]


_watched: ContextVar[list[tuple[Any, tuple[Any, ...], Any]] | None] = ContextVar("flashkernel_applied", default=None)


@contextmanager
def _watching() -> Iterator[list[tuple[Any, tuple[Any, ...], Any]]]:
    """Collect the differentiable operators that are applied inside, with their arguments and outputs."""
    seen: list[tuple[Any, tuple[Any, ...], Any]] = []
    token = _watched.set(seen)
    try:
        yield seen
    finally:
        _watched.reset(token)


def applied(op: Any, args: tuple[Any, ...], outputs: Any) -> None:
    """An operator was applied through autograd."""
    seen = _watched.get()
    if seen is not None:
        seen.append((op, args, outputs))


class _Applied:
    """A call with gradients that ends in one operator: its arguments, and which of its outputs are the result."""

    def __init__(self, op: Any, template: list[tuple[bool, Any]], picked: tuple[int, ...] | None) -> None:
        self.op, self.template, self.picked, self.apply = op, template, picked, op.apply
        self.tensors = [place for place, (from_call, value) in enumerate(template)
                        if from_call or isinstance(value, Tensor)]  # fmt: skip
        self.recording: rec.Recording | None = None

    def __call__(self, tensors: list[Tensor]) -> Any:
        args = [tensors[value] if from_call else value for from_call, value in self.template]
        recording = self.recording
        if recording is None:
            recording = self.recording = self.op.forward.find(tuple(args))
        if recording is None or recording.hooked():
            outputs = self.apply(*args, None)
        else:
            return self.apply(*args, (recording, [args[place] for place in self.tensors], self.picked))
        picked = self.picked
        if picked is None:
            return outputs
        return outputs[picked[0]] if len(picked) == 1 else tuple([outputs[place] for place in picked])


def _applied(
    seen: list[tuple[Any, tuple[Any, ...], Any]], tensors: list[Tensor], result: Any
) -> _Applied | Uncacheable:
    if len(seen) != 1:
        return Uncacheable(f"with gradients it applies {len(seen)} operators, not one")
    op, args, outputs = seen[0]
    places = {id(tensor): place for place, tensor in enumerate(tensors)}
    if len(places) < len(tensors):  # another call of these shapes may pass different ones
        return Uncacheable(rec.SHARED_MEMORY)
    template: list[tuple[bool, Any]] = []
    for value in args:
        if not isinstance(value, Tensor):
            if isinstance(value, list) and any(isinstance(element, Tensor) for element in value):
                return Uncacheable("with gradients, it gives its operator a list of tensors")
            template.append((False, value))
        elif id(value) in places:
            template.append((True, places[id(value)]))
        elif getattr(value, CONSTANT, False):
            template.append((False, value))
        else:
            return Uncacheable("with gradients, it gives its operator a tensor that is none of its arguments")
    if result is outputs:
        return _Applied(op, template, None)
    made = {id(output): place for place, output in enumerate(outputs)} if isinstance(outputs, tuple) else {}
    whole = result if isinstance(result, tuple) else (result,)
    if any(id(one) not in made for one in whole):
        return Uncacheable("with gradients, its result is computed from the operator's outputs")
    if isinstance(result, tuple) and len(result) == 1:
        return Uncacheable("with gradients, its result is a tuple of one")
    return _Applied(op, template, tuple([made[id(one)] for one in whole]))


def off() -> str | None:
    """Why no calls are recorded here; None where they are."""
    if not env.replaying():
        return "FLASHKERNEL_REPLAY is 0"
    if env.interpreting():
        return None
    return driver.unavailable() if torch.cuda.is_available() else "there is no GPU to launch on"


def report() -> list[tuple[str, int, dict[str, int]]]:
    """For each function that was called: its name, how many calls it has recorded, and the reasons of those it has
    not, with how many each."""
    lines = []
    for calls in _caches:
        if calls.calls:
            values = list(calls.calls.values())
            reasons: dict[str, int] = {}
            for value in values:
                if isinstance(value, Uncacheable):
                    reasons[value.reason] = reasons.get(value.reason, 0) + 1
            lines.append((calls.name, sum(type(value) in (rec.Recording, _Applied) for value in values), reasons))
    return lines
