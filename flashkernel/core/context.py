"""A value of a context variable for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

Value = TypeVar("Value")


@contextmanager
def assigned(variable: ContextVar[Value], value: Value) -> Iterator[None]:
    """Inside, the context variable has this value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
