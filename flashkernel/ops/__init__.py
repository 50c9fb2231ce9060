"""One room per operator. A room is a folder with a `spec.py` that declares its operators in `OPS`."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from flashkernel.core.op import Op


@cache
def registry() -> dict[str, Op]:
    """Every operator by name, found by walking the rooms."""
    found: dict[str, Op] = {}
    for room in pkgutil.iter_modules(__path__):
        if room.ispkg:
            for op in importlib.import_module(f"{__name__}.{room.name}.spec").OPS:
                if op.name in found:
                    raise ValueError(f"two rooms declare an operator named {op.name!r}")
                found[op.name] = op
    return found
