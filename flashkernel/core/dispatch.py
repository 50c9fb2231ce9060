"""Chooses the backend of a call, and explains the choice.

A public function calls `choose` once. In eager mode the choice is cached by device, dtype and the call's facts (the
static properties that its backends look at), so it costs a dictionary lookup. torch.compile chooses once, while it
traces, and keeps the choice in the graph.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from flashkernel.core import cuda, replay_switch
from flashkernel.core import device as devices
from flashkernel.core.op import Backend, Call, Op, UnknownFactError
from flashkernel.core.tracing import assume_constant_result

Answer = TypeVar("Answer")

# The backend that `use_backend` forces: a name for all operators, or {operator: name}.
_forced: ContextVar[str | dict[str, str] | None] = ContextVar("flashkernel_backend", default=None)
# The same inside a function that torch.compile traces: dynamo supports a list, but no context variable.
_traced_scopes: list[str | dict[str, str]] = []
_explaining: ContextVar[bool] = ContextVar("flashkernel_explaining", default=False)
_choices: dict[Op, dict[tuple[Any, ...], Backend]] = {}


class BackendError(RuntimeError):
    """The requested backend does not support a call, or no backend does. The message has each backend's reason.

    Example:
        >>> import torch, flashkernel as fk
        >>> try:
        ...     fk.rms_norm(torch.ones(2, 8), backend="hopper")
        ... except fk.BackendError as error:
        ...     print(str(error).splitlines()[0])
        rms_norm: there is no backend 'hopper'; there are
    """


@dataclass(frozen=True)
class Verdict:
    """One backend's answer to a call."""

    backend: str
    reason: str | None  # why it does not support the call; None where it does
    deprioritized: str | None = None  # why it is not selected automatically although it supports the call


@dataclass(frozen=True)
class Explanation:
    """The backend chosen for a call, and the answer of every other one. `explain` returns it; `print` shows it.

    Attributes:
        op: Name of the operator.
        call: Device, dtype and facts that the choice depends on.
        chosen: Name of the chosen backend; None where no backend supports the call.
        forced: The backend that was requested by `backend=` or `use_backend`; None where there was no request.
        verdicts: The answer of each backend, in order of preference.

    Example:
        >>> import torch, flashkernel as fk
        >>> explanation = fk.explain(fk.rms_norm, torch.ones(2, 8))
        >>> explanation.chosen, explanation.forced
        ('torch', None)
        >>> {verdict.backend: verdict.reason for verdict in explanation.verdicts}["reference"] is None
        True
    """

    op: str
    call: Call
    chosen: str | None
    forced: str | None
    verdicts: tuple[Verdict, ...]

    def __str__(self) -> str:
        facts = "".join(f", {name}={value}" for name, value in self.call.facts.items())
        facts += ", with gradients" if self.call.gradients else ""
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
                because = f"; not picked automatically: {verdict.deprioritized}" if verdict.deprioritized else ""
                note = f"could, if asked for{because}"
            lines.append(f"  {verdict.backend:10} {note}")
        return "\n".join(lines)


class _Explained(Exception):
    """Carries the explanation out of a public function, before anything is launched."""

    def __init__(self, explanation: Explanation) -> None:
        self.explanation = explanation


@contextmanager
def use_backend(name: str | None = None, /, **by_operator: str) -> Iterator[None]:
    """Context manager that forces the backend of the calls inside.

    A call with its own `backend=` keeps that one. A backend that does not support a call raises `BackendError`. A
    function under torch.compile keeps the backend that was in force when it was traced.

    Args:
        name: Backend for all operators: "hopper", "triton", "cuda", "cpp", "torch" or "reference".
        by_operator: Backends by operator instead, e.g. `rms_norm="torch"`.

    Example:
        >>> import torch, flashkernel as fk
        >>> with fk.use_backend("reference"):
        ...     fk.explain(fk.rms_norm, torch.ones(2, 8)).chosen
        'reference'
        >>> with fk.use_backend(rms_norm="reference"):
        ...     fk.explain(fk.silu, torch.ones(2, 8)).chosen
        'torch'
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
    with replay_switch.scoped(_forced, scope):
        yield


@assume_constant_result
def _check_known(name: str | None, by_operator: tuple[tuple[str, str], ...]) -> bool:
    """ValueError for the name of an operator or of a backend that does not exist."""
    declared = Op.declared  # complete, since `import flashkernel` imports every operator package
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


def choose(
    op: Op,
    requested: str | None,
    device: torch.device,
    dtype: torch.dtype,
    gradients: bool = False,
    **facts: Any,
) -> Backend:
    """The backend for a call: the requested one, else the first auto-selected one that supports the call.

    Args:
        op: The operator.
        requested: The call's `backend=` argument.
        device: The device of its tensors.
        dtype: The dtype it computes in.
        gradients: Whether autograd records the call; a backend without a backward pass then declines.
        facts: Static properties of the call that its backends look at (`Call.facts`).

    Raises:
        BackendError: The requested backend does not support the call, or no backend does.
    """
    if torch.compiler.is_compiling():
        # index() makes a dynamic size static: the facts become guards of the graph.
        values = tuple([operator.index(value) if isinstance(value, int) else value for value in facts.values()])
        if requested is None and _traced_scopes:
            scope = _traced_scopes[-1]
            requested = scope if isinstance(scope, str) else scope.get(op.name)
        return op.backends[_decide_while_tracing(op.name, requested, device, dtype, gradients, tuple(facts), values)]
    forced = _scoped(op, requested)
    if _explaining.get():
        raise _Explained(_explanation(op, forced, Call(devices.properties(device), dtype, facts, gradients)))
    if devices.pretending() or cuda.in_built_for():
        return _decide(op, forced, Call(devices.properties(device), dtype, facts, gradients))
    key = (forced, device, dtype, gradients, *facts.values())
    known = _choices.setdefault(op, {})
    found = known.get(key)
    if found is None:
        found = known[key] = _decide(op, forced, Call(devices.properties(device), dtype, facts, gradients))
    return found


def is_scoped() -> bool:
    """Whether a `use_backend` scope is in force."""
    return _forced.get() is not None


def _scoped(op: Op, requested: str | None) -> str | None:
    """The backend that the call requests, else that `use_backend` does."""
    if requested is not None:
        return requested
    scoped = _forced.get()
    return scoped if scoped is None or isinstance(scoped, str) else scoped.get(op.name)


def requested_backend(name: str, requested: str | None) -> str | None:
    """The backend that a call or a scope requests of an operator that is computed by another one; None: neither does.

    Args:
        name: The operator's name.
        requested: The call's `backend=` argument.
    """
    if requested is not None:
        return requested
    if not torch.compiler.is_compiling():
        return _scoped(Op.declared[name], None)
    if _traced_scopes:
        scope = _traced_scopes[-1]
        return scope if isinstance(scope, str) else scope.get(name)
    return _scoped_while_tracing(name)


@assume_constant_result
def _scoped_while_tracing(name: str) -> str | None:
    return _scoped(Op.declared[name], None)


@assume_constant_result
def _decide_while_tracing(
    name: str,
    requested: str | None,
    device: torch.device,
    dtype: torch.dtype,
    gradients: bool,
    names: tuple[str, ...],
    values: tuple,
) -> int:
    """Index of the backend, a constant of the graph: dynamo cannot read a context variable or look for packages."""
    op = Op.declared[name]
    call = Call(devices.properties(device), dtype, dict(zip(names, values)), gradients)
    found = _decide(op, _scoped(op, requested), call)
    found.run  # noqa: B018  imports the backend now, because dynamo cannot trace an import
    return op.backends.index(found)


def explain(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """Explain which backend `function(*args, **kwargs)` would use, and why not the others. Launches nothing.

    Args:
        function: A public function, such as `flashkernel.rms_norm`.
        args: Its positional arguments.
        kwargs: Its keyword arguments, `backend=` among them.

    Returns:
        An `Explanation`, which prints as a table of the backends.

    Example:
        >>> import torch, flashkernel as fk
        >>> print(fk.explain(fk.rms_norm, torch.ones(2, 8), backend="reference"))  # doctest: +ELLIPSIS
        rms_norm on ..., float32, width=8: reference
          triton     ...
          torch      could, but 'reference' was asked for
          reference  chosen, because backend='reference' was asked for
    """
    try:
        with replay_switch.scoped(_explaining, True):
            function(*args, **kwargs)
    except _Explained as answer:
        return answer.explanation
    raise TypeError(f"explain: {function!r} is not an operator of flashkernel; pass one, such as flashkernel.rms_norm")


def _ask(op: Op, backend: Backend, question: Callable[[Call], Answer], call: Call) -> Answer:
    """What a backend answers about a call; an error of its package names the operator and the backend."""
    try:
        return question(call)
    except UnknownFactError as error:
        raise UnknownFactError(f"{op.name}: backend {backend.name!r} asks for {error}") from None


def _unsupported(op: Op, backend: Backend, call: Call) -> str | None:
    """Why a backend does not support a call; None where it does."""
    reason = _ask(op, backend, backend.supports, call)
    if reason is None and call.gradients and not backend.offers(op.backward):
        return "it has no backward pass; call it under torch.no_grad(), or use another backend"
    return reason


def _decide(op: Op, forced: str | None, call: Call) -> Backend:
    if forced is not None:
        backend = _named(op, forced, call)
        reason = _unsupported(op, backend, call)
        if reason is not None:
            raise BackendError(f"{op.name}: backend {forced!r} cannot serve this call: {reason}\n{_reasons(op, call)}")
        return backend
    for backend in op.backends:
        if _ask(op, backend, backend.auto_selected, call) and _unsupported(op, backend, call) is None:
            return backend
    raise BackendError(f"{op.name}: no backend can serve this call\n{_reasons(op, call)}")


def _named(op: Op, name: str, call: Call) -> Backend:
    for backend in op.backends:
        if backend.name == name:
            return backend
    raise BackendError(f"{op.name}: there is no backend {name!r}; there are\n{_reasons(op, call)}")


def _reasons(op: Op, call: Call) -> str:
    return "\n".join(f"  {backend.name}: {_unsupported(op, backend, call) or 'can serve'}" for backend in op.backends)


def _explanation(op: Op, forced: str | None, call: Call) -> Explanation:
    verdicts = tuple(
        Verdict(backend.name, _unsupported(op, backend, call), _ask(op, backend, backend.reason_against, call))
        for backend in op.backends
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
