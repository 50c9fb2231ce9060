"""flash-attn's arguments as plain Python values: it takes NumPy scalars and 0-dim tensors as well."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any


def integer(name: str, label: str, value: Any) -> int:
    """`value` as an int: a Python or NumPy integer, or a tensor of one; TypeError for anything else."""
    if type(value) is int:
        return value
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: {label} is {value!r}; it must be an integer") from None


def number(name: str, label: str, value: Any) -> float:
    """`value` as a float: a Python or NumPy number, or a tensor of one; TypeError for anything else."""
    if type(value) is float:
        return value
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name}: {label} is {value!r}; it must be a number") from None


def optional_number(name: str, label: str, value: Any) -> float | None:
    """`number`, or None where nothing was given."""
    return None if value is None else number(name, label, value)


def window_sides(name: str, window_size: Sequence[Any]) -> tuple[int, int]:
    """(left, right) as integers; -1 is no limit."""
    try:
        sides = tuple(window_size)
    except TypeError:
        sides = ()
    if len(sides) != 2:
        raise ValueError(f"{name}: window_size is {window_size!r}; give (left, right), -1 for no limit")
    return integer(name, "window_size[0]", sides[0]), integer(name, "window_size[1]", sides[1])


def positive_softcap(name: str, softcap: Any) -> float:
    """`softcap`, or 0 (none) where it is negative, as in flash-attn; NaN is left for the operator to refuse."""
    value = number(name, "softcap", softcap)
    return 0.0 if value <= 0 else value
