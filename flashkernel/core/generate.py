"""Triton functions generated from source text at run time (masks, score functions, epilogues)."""

from __future__ import annotations

import hashlib
import linecache
from functools import cache
from typing import Any


@cache
def jit_function(name: str, parameters: str, text: str) -> Any:
    """A Triton function `name(parameters)` that returns the expression `text`; the same for equal texts."""
    import triton
    import triton.language as tl

    source = f"def {name}({parameters}):\n    return {text}\n"
    file = f"<flashkernel {name} {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    # Triton reads a function's source through inspect, which looks it up in linecache.
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    names: dict[str, Any] = {"tl": tl}
    exec(compile(source, file, "exec"), names)
    made = names[name]
    made.__module__ = __name__
    return triton.jit(made)
