"""How often this process compiled a kernel, captured a CUDA graph or tuned a config.

A server makes all of these before its first request. The counts show whether it did.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class BuildCounts:
    """Events since the process began. A kernel that is read from a cache on disk counts as compiled."""

    compiled: int = 0
    captured: int = 0
    tuned: int = 0

    @property
    def total(self) -> int:
        """All events."""
        return self.compiled + self.captured + self.tuned


_lock = threading.Lock()
_counts = BuildCounts()
_watching = False


def counts() -> BuildCounts:
    """The counts so far.

    Example:
        >>> from flashkernel.core import build_counter
        >>> before = build_counter.counts()
        >>> build_counter.note("captured")
        >>> build_counter.counts().captured - before.captured
        1
    """
    return _counts


def note(kind: str) -> None:
    """Counts one event: "compiled", "captured" or "tuned"."""
    global _counts
    with _lock:
        _counts = replace(_counts, **{kind: getattr(_counts, kind) + 1})


def watch_triton() -> None:
    """From now on every kernel that Triton compiles, or loads from its cache, is counted."""
    global _watching
    if _watching:
        return
    try:
        from triton import knobs
    except ImportError:
        return  # nothing to watch: there is no Triton
    _watching = True
    before = knobs.runtime.jit_post_compile_hook

    def hook(*args: Any, **kwargs: Any) -> Any:
        note("compiled")
        return None if before is None else before(*args, **kwargs)

    knobs.runtime.jit_post_compile_hook = hook
