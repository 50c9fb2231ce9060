"""How often this process compiled a kernel, captured a CUDA graph or tuned a config.

A server makes all of these before its first request. The counts show whether it did.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class BuildCounts:
    """Events since the process began: kernels compiled, kernels loaded from a cache on disk, and so on."""

    compiled: int = 0
    loaded: int = 0
    captured: int = 0
    tuned: int = 0

    @property
    def total(self) -> int:
        """All events."""
        return self.compiled + self.loaded + self.captured + self.tuned


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
    """Counts one event: "compiled", "loaded", "captured" or "tuned"."""
    global _counts
    with _lock:
        _counts = replace(_counts, **{kind: getattr(_counts, kind) + 1})


def watch_triton() -> None:
    """From now on every kernel that Triton compiles, or loads from its cache, is counted.

    By its listener, not by its hooks: for a hook it writes the constants of a kernel as JSON, which fails for some.
    """
    global _watching
    if _watching:
        return
    try:
        from triton import knobs
    except ImportError:
        return  # nothing to watch: there is no Triton
    _watching = True
    before = knobs.compilation.listener

    def listener(**facts: Any) -> None:
        note("loaded" if facts["cache_hit"] else "compiled")
        if before is not None:
            before(**facts)

    knobs.compilation.listener = listener
