"""Which backend runs a call, and why each other one was passed over.

A public function asks `choose` once per call. In eager mode the answer is cached on the call's static facts, so it
costs a dictionary lookup; torch.compile makes it once, while tracing, and keeps it in the graph.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from flashkernel.core import device as devices
from flashkernel.core import state
from flashkernel.core.op import Backend, Call, Op

# Backend forced by `use_backend`: a name for every operator, or {operator: name}.
_forced: ContextVar[str | dict[str, str] | None] = ContextVar("flashkernel_backend", default=None)
# The same inside a function that torch.compile traces: dynamo follows a list, but no context variable.
_traced_scopes: list[str | dict[str, str]] = []
_explaining: ContextVar[bool] = ContextVar("flashkernel_explaining", default=False)
_choices: dict[Op, dict[tuple[Any, ...], Backend]] = {}


class BackendError(RuntimeError):
    """The backend asked for cannot serve this call, or none can."""


@dataclass(frozen=True)
class Verdict:
    """One backend's answer to a call: `reason` is None where it can serve; `deprioritised` says why a backend that
    can serve is not picked automatically."""

    backend: str
    reason: str | None
    deprioritised: str | None = None


@dataclass(frozen=True)
class Explanation:
    """The choice made for a call, and what every backend said."""

    op: str
    call: Call
    chosen: str | None
    forced: str | None
    verdicts: tuple[Verdict, ...]

    def __str__(self) -> str:
        facts = "".join(f", {name}={value}" for name, value in self.call.facts.items())
        dtype = str(self.call.dtype).removeprefix("torch.")
        lines = [f"{self.op} on {self.call.device.name}, {dtype}{facts}: {self.chosen or 'no backend'}"]
        for verdict in self.verdicts:
            if verdict.backend == self.chosen:
                note = f"chosen, because backend={self.forced!r} was asked for" if self.forced else "chosen"
            elif verdict.reason:
                note = f"cannot: {verdict.reason}"
            elif self.forced:
                note = f"could, but {self.forced!r} was asked for"
            else:
                because = f"; not picked automatically: {verdict.deprioritised}" if verdict.deprioritised else ""
                note = f"could, if asked for{because}"
            lines.append(f"  {verdict.backend:10} {note}")
        return "\n".join(lines)


class _Explained(Exception):
    """Carries the explanation out of a public function, before anything is launched."""

    def __init__(self, explanation: Explanation) -> None:
        self.explanation = explanation


@contextmanager
def use_backend(name: str | None = None, /, **by_operator: str) -> Iterator[None]:
    """Run the calls inside on one backend: `use_backend("triton")`, or `use_backend(rms_norm="torch")` for one of them.

    A call that names its own `backend=` keeps it. A backend that cannot serve a call raises, as it does per call.
    A function under torch.compile keeps the choice that was in force when it was traced, outside or inside it.
    """
    if (name is None) == (not by_operator):
        raise ValueError('use_backend takes one name for all operators, or operator="name" pairs')
    _check_known(name, tuple(by_operator.items()))
    scope = name if name is not None else by_operator
    if torch.compiler.is_compiling():
        _traced_scopes.append(scope)
        try:
            yield
        finally:
            _traced_scopes.pop()
        return
    token = _forced.set(scope)
    try:
        with state.suspended():
            yield
    finally:
        _forced.reset(token)


@torch.compiler.assume_constant_result
def _check_known(name: str | None, by_operator: tuple[tuple[str, str], ...]) -> bool:
    """ValueError where an operator, or its backend, or a backend for all of them, is not there."""
    declared = Op.declared  # all of them: importing flashkernel imports every room
    if name is not None and not any(backend.name == name for op in declared.values() for backend in op.backends):
        known = list(dict.fromkeys(backend.name for op in declared.values() for backend in op.backends))
        raise ValueError(f"use_backend: no operator has a backend {name!r}; there are {', '.join(known)}")
    for operator_name, backend_name in by_operator:
        if operator_name not in declared:
            raise ValueError(f"use_backend: there is no operator {operator_name!r}; there are {', '.join(declared)}")
        known = [backend.name for backend in declared[operator_name].backends]
        if backend_name not in known:
            raise ValueError(f"use_backend: {operator_name} has no backend {backend_name!r}; it has {', '.join(known)}")
    return True


def choose(op: Op, requested: str | None, device: torch.device, dtype: torch.dtype, **facts: Any) -> Backend:
    """The backend for a call: the one asked for, else the first in priority that supports it."""
    if torch.compiler.is_compiling():
        # index() makes a dynamic size static: what decides the backend becomes a guard of the graph.
        values = tuple([operator.index(value) if isinstance(value, int) else value for value in facts.values()])
        if requested is None and _traced_scopes:
            scope = _traced_scopes[-1]
            requested = scope if isinstance(scope, str) else scope.get(op.name)
        return op.backends[_decide_while_tracing(op.name, requested, device, dtype, tuple(facts), values)]
    forced = _scoped(op, requested)
    if _explaining.get():
        raise _Explained(_explanation(op, forced, Call(devices.facts(device), dtype, facts)))
    if devices.pretending():
        return _decide(op, forced, Call(devices.facts(device), dtype, facts))
    key = (forced, device, dtype, *facts.values())
    known = _choices.setdefault(op, {})
    found = known.get(key)
    if found is None:
        found = known[key] = _decide(op, forced, Call(devices.facts(device), dtype, facts))
    return found


def _scoped(op: Op, requested: str | None) -> str | None:
    """The backend asked for by the call, else by `use_backend`."""
    if requested is not None:
        return requested
    scoped = _forced.get()
    return scoped if scoped is None or isinstance(scoped, str) else scoped.get(op.name)


@torch.compiler.assume_constant_result
def _decide_while_tracing(
    name: str, requested: str | None, device: torch.device, dtype: torch.dtype, names: tuple[str, ...], values: tuple
) -> int:
    """The choice as a constant of the graph: tracers cannot read a context variable or ask what is installed."""
    op = Op.declared[name]
    call = Call(devices.facts(device), dtype, dict(zip(names, values)))
    found = _decide(op, _scoped(op, requested), call)
    found.run  # noqa: B018  imported here, because a tracer cannot follow an import either
    return op.backends.index(found)


def explain(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """Say which backend `function(*args, **kwargs)` would run on and why not each other one; nothing is launched."""
    token = _explaining.set(True)
    try:
        with state.suspended():
            function(*args, **kwargs)
    except _Explained as answer:
        return answer.explanation
    finally:
        _explaining.reset(token)
    raise TypeError(f"explain: {function!r} is not an operator of flashkernel; pass one, such as flashkernel.rms_norm")


def _decide(op: Op, forced: str | None, call: Call) -> Backend:
    if forced is not None:
        backend = _named(op, forced, call)
        reason = backend.supports(call)
        if reason is not None:
            raise BackendError(f"{op.name}: backend {forced!r} cannot serve this call: {reason}\n{_reasons(op, call)}")
        return backend
    for backend in op.backends:
        if backend.auto_selected(call) and backend.supports(call) is None:
            return backend
    raise BackendError(f"{op.name}: no backend can serve this call\n{_reasons(op, call)}")


def _named(op: Op, name: str, call: Call) -> Backend:
    for backend in op.backends:
        if backend.name == name:
            return backend
    raise BackendError(f"{op.name}: there is no backend {name!r}; there are\n{_reasons(op, call)}")


def _reasons(op: Op, call: Call) -> str:
    return "\n".join(f"  {backend.name}: {backend.supports(call) or 'can serve'}" for backend in op.backends)


def _explanation(op: Op, forced: str | None, call: Call) -> Explanation:
    verdicts = tuple(
        Verdict(backend.name, backend.supports(call), backend.reason_against(call)) for backend in op.backends
    )
    if forced is not None and forced not in {verdict.backend for verdict in verdicts}:
        _named(op, forced, call)
    chosen = next(
        (
            backend.name
            for backend, verdict in zip(op.backends, verdicts)
            if verdict.reason is None and (backend.name == forced if forced else backend.auto_selected(call))
        ),
        None,
    )
    return Explanation(op.name, call, chosen, forced, verdicts)
