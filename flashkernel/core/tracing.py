"""Marks for torch.compile that cost no import of torch._dynamo."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, TypeVar

from flashkernel.core.context import assigned

_Function = TypeVar("_Function", bound=Callable[..., Any])


def assume_constant_result(function: _Function) -> _Function:
    """Mark a function whose result torch.compile computes once, while it traces, and keeps in the graph.

    Does what `torch.compiler.assume_constant_result` does. That one imports torch._dynamo, which takes as long as
    torch itself.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


_in_graph: ContextVar[bool] = ContextVar("flashkernel_in_compiled_graph", default=False)


def in_compiled_graph() -> bool:
    """True inside an operator that a compiled graph, or anything else that intercepts calls, runs through
    torch.library: what it allocates may belong to a CUDA graph and must not be kept."""
    return _in_graph.get()


def compiled_graph() -> AbstractContextManager[None]:
    """Marks the run of an operator through torch.library."""
    return assigned(_in_graph, True)
