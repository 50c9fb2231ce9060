"""Marks for torch.compile that cost no import of torch._dynamo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


def assume_constant_result(function: _Function) -> _Function:
    """Mark a function whose result torch.compile computes once, while it traces, and keeps in the graph.

    Does what `torch.compiler.assume_constant_result` does. That one imports torch._dynamo, which takes as long as
    torch itself.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
