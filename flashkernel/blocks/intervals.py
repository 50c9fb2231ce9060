"""Expressions over intervals of indices: what a whole tile has in common, without looking at its pairs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks.expression import (
    BOOLEAN,
    Constant,
    Expression,
    Gather,
    Operation,
    Variable,
    as_tensors,
    integers_as_float32,
)
from flashkernel.blocks.nodes import FLOAT, maximum, minimum, where


@dataclass(frozen=True)
class Interval:
    """Bounds of a number over a tile, both reached or beyond: low <= value <= high.

    A float that may be NaN is bounded by -inf and inf.
    """

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
    Where these are expressions, so is the result (blocks/tile_status.py makes a kernel of it).
    """
    if isinstance(expression, Variable):
        return tiles[expression.name]
    if isinstance(expression, Constant):
        value = expression.value
        return Truth(value, value) if isinstance(value, bool) else Interval(value, value)
    if isinstance(expression, Gather):
        found = gather(expression)
        return Truth(found.high != 0, found.low != 0) if expression.kind == BOOLEAN else found
    assert isinstance(expression, Operation)
    args = [bounds(arg, tiles, gather) for arg in expression.args]
    if any(isinstance(arg, Interval) and (type(arg.low) is float or type(arg.high) is float) for arg in args):
        args = [Interval(*integers_as_float32(arg.low, arg.high)) if isinstance(arg, Interval) else arg for arg in args]
    return _BOUNDS[expression.name](*args)


def _least(*values: Any) -> Any:
    return _extreme(torch.minimum, minimum, min, values)


def _most(*values: Any) -> Any:
    return _extreme(torch.maximum, maximum, max, values)


def _extreme(
    of_tensors: Callable[..., Any], of_expressions: Callable[..., Any], of_numbers: Callable[..., Any],
    values: tuple[Any, ...],
) -> Any:  # fmt: skip
    result = values[0]
    for value in values[1:]:
        if isinstance(result, Tensor) or isinstance(value, Tensor):
            result = of_tensors(*as_tensors(result, value))
        elif isinstance(result, Expression) or isinstance(value, Expression):
            result = of_expressions(result, value)
        else:
            result = of_numbers(result, value)
    return result


def _interval(low: Any, high: Any) -> Interval:
    """Bounds that were computed: where inf - inf or 0 * inf made one of them NaN, the value may be NaN as well."""
    if not (_is_float(low) or _is_float(high)):
        return Interval(low, high)
    unknown = (low != low) | (high != high)
    return Interval(_pick(unknown, -math.inf, low), _pick(unknown, math.inf, high))


def _is_float(value: Any) -> bool:
    if isinstance(value, Expression):
        return value.kind == FLOAT
    return value.is_floating_point() if isinstance(value, Tensor) else isinstance(value, float)


def _pick(condition: Any, a: Any, b: Any) -> Any:
    """`a` where the condition holds, else `b`; each may be a tensor or a plain value."""
    if isinstance(condition, Tensor):
        return torch.where(condition, *as_tensors(a, b))
    if isinstance(condition, Expression):
        return where(condition, a, b)
    return a if condition else b


def _product(a: Interval, b: Interval) -> Interval:
    corners = (a.low * b.low, a.low * b.high, a.high * b.low, a.high * b.high)
    found = Interval(_least(*corners), _most(*corners))
    if not _is_float(found.low):
        return found
    unknown: Any = False
    for corner in corners:
        unknown = unknown | (corner != corner)
    return Interval(_pick(unknown, -math.inf, found.low), _pick(unknown, math.inf, found.high))


def _remainder(a: Interval, b: Interval) -> Interval:
    by = b.low
    together = a.low // by == a.high // by  # no multiple between them: the remainder rises with the value
    return Interval(_pick(together, a.low % by, 0), _pick(together, a.high % by, by - 1))


def _bits(a: Interval, b: Interval) -> tuple[Any, Any]:
    """Bounds of whatever has no more bits than two integers: at most twice the larger magnitude, either way."""
    size = 2 * _most(-a.low, a.high, -b.low, b.high, 1)
    return -size, size


def _bitwise_and(a: Interval, b: Interval) -> Interval:
    low, high = _bits(a, b)
    for one in (a, b):  # the result has no bits but those of an operand that is not negative
        low, high = _pick(one.low >= 0, 0, low), _pick(one.low >= 0, _least(high, one.high), high)
    return Interval(low, high)


def _bitwise_or(a: Interval, b: Interval) -> Interval:
    low, high = _bits(a, b)
    plain = (a.low >= 0) & (b.low >= 0)
    return Interval(_pick(plain, _most(a.low, b.low), low), _pick(plain, _least(high, a.high + b.high), high))


def _not(a: Any) -> Any:
    return ~a if isinstance(a, (Tensor, Expression)) else not a


def _magnitude(a: Interval) -> Interval:
    low = _most(a.low, -a.high, 0)
    return Interval(_pick(_may_be_nan(a), -math.inf, low) if _is_float(low) else low, _most(-a.low, a.high))


def _unbounded(*_: Any) -> Interval:
    return Interval(-math.inf, math.inf)


def _may_be_nan(*intervals: Interval) -> Any:
    found: Any = False
    for one in intervals:
        if _is_float(one.low) and _is_float(one.high):
            found = found | ((one.low == -math.inf) & (one.high == math.inf))
    return found


def _at_most(a: Interval, b: Interval) -> Truth:
    return Truth(a.low <= b.high, _pick(_may_be_nan(a, b), False, a.high <= b.low))


def _same(a: Any, b: Any) -> Truth:
    if isinstance(a, Truth):
        some = (a.some & b.some) | (_not(a.every) & _not(b.every))
        return Truth(some, (a.every & b.every) | (_not(a.some) & _not(b.some)))
    every = (a.low == a.high) & (b.low == b.high) & (a.low == b.low)
    return Truth((a.low <= b.high) & (b.low <= a.high), every)


def _extremum(of: Callable[..., Any], a: Interval, b: Interval) -> Interval:
    unknown = _may_be_nan(a, b)
    return Interval(_pick(unknown, -math.inf, of(a.low, b.low)), _pick(unknown, math.inf, of(a.high, b.high)))


def _either(condition: Truth, a: Any, b: Any) -> Any:
    """The bounds of the branch that a whole tile takes, or of both together."""
    first, second = condition.every, _not(condition.some)
    if isinstance(a, Truth):
        some = (condition.some & a.some) | (_not(condition.every) & b.some)
        return Truth(some, (a.every & b.every) | (first & a.every) | (second & b.every))
    low, high = _least(a.low, b.low), _most(a.high, b.high)
    return Interval(
        _pick(first, a.low, _pick(second, b.low, low)),
        _pick(first, a.high, _pick(second, b.high, high)),
    )


_BOUNDS: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: _interval(a.low + b.low, a.high + b.high),
    "sub": lambda a, b: _interval(a.low - b.high, a.high - b.low),
    "mul": _product,
    "div": _unbounded,
    "floordiv": lambda a, b: Interval(a.low // b.low, a.high // b.low),
    "mod": _remainder,
    "lt": lambda a, b: Truth(a.low < b.high, a.high < b.low),
    "le": _at_most,
    "eq": _same,
    "and": lambda a, b: Truth(a.some & b.some, a.every & b.every),
    "or": lambda a, b: Truth(a.some | b.some, a.every | b.every),
    "not": lambda a: Truth(_not(a.every), _not(a.some)),
    "bitand": _bitwise_and,
    "bitor": _bitwise_or,
    "min": lambda a, b: _extremum(_least, a, b),
    "max": lambda a, b: _extremum(_most, a, b),
    "where": _either,
    "tanh": _unbounded,
    "exp": _unbounded,
    "abs": _magnitude,
}
