"""Expressions over intervals of indices: what a whole tile has in common, without looking at its pairs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks.expression import Constant, Expression, Gather, Operation, Variable, as_tensors


@dataclass(frozen=True)
class Interval:
    """Bounds of a number over a tile, both reached or beyond: low <= value <= high."""

    low: Any
    high: Any


@dataclass(frozen=True)
class Truth:
    """Of a condition over a tile: may it hold somewhere, and does it hold everywhere."""

    some: Any
    every: Any


def bounds(expression: Expression, tiles: Mapping[str, Interval], gather: Callable[[Gather], Interval]) -> Any:
    """The Interval or Truth of an expression over tiles; never too narrow, sometimes too wide.

    `tiles` gives the variables' bounds as tensors that broadcast, one element a tile; `gather` bounds a table's values.
    """
    if isinstance(expression, Variable):
        return tiles[expression.name]
    if isinstance(expression, Constant):
        value = expression.value
        return Truth(value, value) if isinstance(value, bool) else Interval(value, value)
    if isinstance(expression, Gather):
        return gather(expression)
    assert isinstance(expression, Operation)
    return _BOUNDS[expression.name](*(bounds(arg, tiles, gather) for arg in expression.args))


def _least(*values: Any) -> Any:
    return _extreme(torch.minimum, min, values)


def _most(*values: Any) -> Any:
    return _extreme(torch.maximum, max, values)


def _extreme(of_tensors: Callable[..., Any], of_numbers: Callable[..., Any], values: tuple[Any, ...]) -> Any:
    result = values[0]
    for value in values[1:]:
        if isinstance(result, Tensor) or isinstance(value, Tensor):
            result = of_tensors(*as_tensors(result, value))
        else:
            result = of_numbers(result, value)
    return result


def _product(a: Interval, b: Interval) -> Interval:
    corners = (a.low * b.low, a.low * b.high, a.high * b.low, a.high * b.high)
    return Interval(_least(*corners), _most(*corners))


def _remainder(a: Interval, b: Interval) -> Interval:
    if isinstance(a.low, Tensor) or isinstance(a.high, Tensor):
        low, high = as_tensors(a.low, a.high)
        together = low // b.low == high // b.low  # no multiple between them: the remainder rises with the value
        return Interval(torch.where(together, low % b.low, 0), torch.where(together, high % b.low, b.low - 1))
    together = a.low // b.low == a.high // b.low
    return Interval(a.low % b.low if together else 0, a.high % b.low if together else b.low - 1)


def _not(a: Any) -> Any:
    return ~a if isinstance(a, Tensor) else not a


def _magnitude(a: Interval) -> Interval:
    low = _most(a.low, -a.high, 0)
    return Interval(low, _most(-a.low, a.high))


def _unbounded(*_: Any) -> Interval:
    return Interval(float("-inf"), float("inf"))


_BOUNDS: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: Interval(a.low + b.low, a.high + b.high),
    "sub": lambda a, b: Interval(a.low - b.high, a.high - b.low),
    "mul": _product,
    "div": _unbounded,
    "floordiv": lambda a, b: Interval(a.low // b.low, a.high // b.low),
    "mod": _remainder,
    "lt": lambda a, b: Truth(a.low < b.high, a.high < b.low),
    "le": lambda a, b: Truth(a.low <= b.high, a.high <= b.low),
    "eq": lambda a, b: Truth(
        (a.low <= b.high) & (b.low <= a.high), (a.low == a.high) & (b.low == b.high) & (a.low == b.low)
    ),
    "and": lambda a, b: Truth(a.some & b.some, a.every & b.every),
    "or": lambda a, b: Truth(a.some | b.some, a.every | b.every),
    "not": lambda a: Truth(_not(a.every), _not(a.some)),
    "min": lambda a, b: Interval(_least(a.low, b.low), _least(a.high, b.high)),
    "max": lambda a, b: Interval(_most(a.low, b.low), _most(a.high, b.high)),
    "where": lambda c, a, b: _either(c, a, b),
    "tanh": _unbounded,
    "exp": _unbounded,
    "abs": _magnitude,
}


def _either(condition: Truth, a: Any, b: Any) -> Any:
    """The bounds of both branches together; a condition of truth values keeps its logic."""
    if isinstance(a, Truth):
        some = (condition.some & a.some) | (_not(condition.every) & b.some)
        return Truth(some, a.every & b.every)
    return Interval(_least(a.low, b.low), _most(a.high, b.high))
