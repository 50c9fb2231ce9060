"""Public names of a package that are imported when they are first used (PEP 562).

`import flashkernel` then takes no longer than an empty file, and a process that needs one part imports that part.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def attach(
    package: str, names: Mapping[str, Sequence[str]], submodules: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package.

    A package calls it where type checkers do not look, and imports the same names under `TYPE_CHECKING`. A name is
    looked up once: it is then an attribute of the package.

    Args:
        package: The package's `__name__`.
        names: Module, relative to the package -> the public names that it defines.
        submodules: Modules of the package that are attributes without being imported.

    Returns:
        The two functions.
    """
    module_of = {name: f"{package}.{module}" for module, given in names.items() for name in given}

    def load(name: str) -> Any:
        if name in module_of:
            value = getattr(importlib.import_module(module_of[name]), name)
        elif name in submodules:
            value = importlib.import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value)
        return value

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[package]), *module_of, *submodules})

    return load, listed
