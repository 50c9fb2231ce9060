"""The switch that turns replay (core/replay.py) off for a while.

A context that changes what a call does without changing its arguments (a forced backend, a pretended GPU, an overridden
config, an observer of launches) holds `suspended()` or `scoped()`. The check on every call is one comparison.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from flashkernel.core.context import Value, assigned

_lock = threading.Lock()
suspensions = 0  # of all threads: calls of other threads get slower, never wrong


@contextmanager
def suspended() -> Iterator[None]:
    """Inside, no call is replayed, recorded or counted."""
    global suspensions
    with _lock:
        suspensions += 1
    try:
        yield
    finally:
        with _lock:
            suspensions -= 1


@contextmanager
def scoped(variable: ContextVar[Value], value: Value) -> Iterator[None]:
    """Inside, the context variable has this value and replay is suspended."""
    with assigned(variable, value), suspended():
        yield
