"""Figures of matplotlib without its global state: no backend is chosen for the process, pyplot keeps no figure."""

from __future__ import annotations

from typing import Any


def new_figure(purpose: str, **options: Any) -> Any:
    """An empty `matplotlib.figure.Figure`, which `savefig` writes in the format that the file's name says.

    Args:
        purpose: What needs matplotlib: the subject of the message where it is not installed.
        options: Of `Figure`, such as `figsize`.

    Raises:
        ImportError: matplotlib is not installed; the message has the command that installs it.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"{purpose} needs matplotlib ({error}); pip install 'flashkernel[plot]'") from error
    return Figure(**options)
