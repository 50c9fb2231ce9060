"""Operator packages. Each has a `spec.py` that declares its operators in `OPS`."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from flashkernel.core.op import Op


@cache
def registry() -> dict[str, Op]:
    """All operators by name, from `OPS` of every operator package.

    Example:
        >>> "rms_norm" in registry()
        True
    """
    found: dict[str, Op] = {}
    for package in pkgutil.iter_modules(__path__):
        if package.ispkg:
            for op in importlib.import_module(f"{__name__}.{package.name}.spec").OPS:
                if op.name in found:
                    raise ValueError(f"two packages declare an operator named {op.name!r}")
                found[op.name] = op
    return found
