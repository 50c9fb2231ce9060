"""The switch that turns replay (core/replay.py) off for a while.

A context that changes what a call does without changing its arguments (a forced backend, a pretended GPU, an overridden
config, an observer of launches) holds `suspended()` or `scoped()`. The check on every call is one comparison.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from flashkernel.core.context import Value, assigned

_lock = threading.Lock()
# One number, which core/native reads from memory. Of all threads: calls of other threads get slower, never wrong.
suspensions = array("q", [0])


@contextmanager
def suspended() -> Iterator[None]:
    """Inside, no call is replayed, recorded or counted."""
    with _lock:
        suspensions[0] += 1
    try:
        yield
    finally:
        with _lock:
            suspensions[0] -= 1


@contextmanager
def scoped(variable: ContextVar[Value], value: Value) -> Iterator[None]:
    """Inside, the context variable has this value and replay is suspended."""
    with assigned(variable, value), suspended():
        yield
