"""Optional packages, and the message that says how to install one that is missing."""

from __future__ import annotations

import importlib

# package -> the extra of flashkernel that installs it
EXTRAS = {"transformers": "hf", "matplotlib": "plot", "llama_cpp": "llama-cpp"}


class MissingPackageError(RuntimeError):
    """An optional package is not installed; the message has the command that installs it."""


def require(package: str, purpose: str) -> None:
    """Raises MissingPackageError where an optional package cannot be imported.

    Args:
        package: name of the package, a key of `EXTRAS`.
        purpose: what needs it, the subject of the message.
    """
    try:
        importlib.import_module(package)
    except ImportError as error:
        name = package.partition(".")[0]
        raise MissingPackageError(
            f"{purpose} needs {name} ({error}); install it: pip install 'flashkernel[{EXTRAS[name]}]'"
        ) from error
