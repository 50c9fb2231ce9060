"""Triton functions generated from source text at run time (masks, score functions, epilogues)."""

from __future__ import annotations

import hashlib
import linecache
from functools import cache
from typing import Any


@cache
def jit_function(name: str, parameters: str, text: str) -> Any:
    """A Triton function `name(parameters)` that returns the expression `text`; the same for equal texts."""
    return _function(name, parameters, (f"return {text}",), ())


@cache
def jit_statements(name: str, parameters: str, lines: tuple[str, ...], functions: tuple[tuple[str, Any], ...]) -> Any:
    """A Triton function `name(parameters)` of these lines, which may call the named functions."""
    return _function(name, parameters, lines, functions)


def _function(name: str, parameters: str, lines: tuple[str, ...], functions: tuple[tuple[str, Any], ...]) -> Any:
    import triton
    import triton.language as tl

    source = f"def {name}({parameters}):\n" + "".join(f"    {line}\n" for line in lines)
    file = f"<flashkernel {name} {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    # Triton reads a function's source through inspect, which looks it up in linecache.
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    names: dict[str, Any] = {"tl": tl, **dict(functions)}
    exec(compile(source, file, "exec"), names)
    made = names[name]
    made.__module__ = __name__
    return triton.jit(made)
