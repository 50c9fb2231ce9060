"""Keys of Triton's cache on disk that do not depend on the order of launches.

The key of a kernel has the constexpr globals of the functions it calls, but only of those whose own key is known when
its key is computed: a kernel that is launched first gets another key than after one that shares functions with it, and
is compiled again. So the keys of called functions are computed first, innermost first.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any


def compute_cache_keys(kernel: Any) -> None:
    """Computes the cache keys of a `triton.jit` function and of all functions it calls, unless that was done."""
    if getattr(kernel, "hash", "") is None:
        _compute(kernel, set())


def _compute(function: Any, seen: set[int]) -> None:
    seen.add(id(function))
    for called in _called(function):
        if called.hash is None and id(called) not in seen:
            _compute(called, seen)
    function.cache_key  # noqa: B018  computes it


def _called(function: Any) -> Iterator[Any]:
    """The jit functions that the text of a jit function names, by itself or as an attribute of a module or class."""
    code, names = function.fn.__code__, {**function.fn.__globals__}
    cells = zip(code.co_freevars, function.fn.__closure__ or ())
    names.update({name: cell.cell_contents for name, cell in cells})
    for name in (*code.co_names, *code.co_freevars):
        value = names.get(name)
        if _is_jit(value):
            yield value
        elif isinstance(value, ModuleType):
            yield from filter(_is_jit, (getattr(value, attribute, None) for attribute in code.co_names))
        elif getattr(value, "__triton_aggregate__", False):
            yield from filter(_is_jit, getattr(value, "hash_attrs", ()))


def _is_jit(value: Any) -> bool:
    return hasattr(value, "cache_key") and hasattr(value, "fn") and hasattr(value, "hash")
