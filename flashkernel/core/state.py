"""Whether calls may take the short way of core/replay.py.

Whoever changes what a call means without changing its arguments (a forced backend, a pretended GPU, an overridden
config, a recording) holds `suspended()` meanwhile; the check on every call is then one number.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
suspensions = 0  # of all threads: another thread's calls lose time, never their meaning


@contextmanager
def suspended() -> Iterator[None]:
    """Inside, every call goes the whole way."""
    global suspensions
    with _lock:
        suspensions += 1
    try:
        yield
    finally:
        with _lock:
            suspensions -= 1
