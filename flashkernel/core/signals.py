"""Handlers of signals for the time of a block."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def handled(number: signal.Signals, handler: Callable[..., Any] | signal.Handlers) -> Iterator[None]:
    """A signal has this handler inside the block, where Python lets it be set: in the main thread.

    Args:
        number: The signal.
        handler: What `signal.signal` takes. Processes that start in the block inherit `signal.SIG_IGN`.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)
