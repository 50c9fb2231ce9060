"""Derivatives of expressions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashkernel.blocks.nodes import BOOLEAN, Constant, Expression, Operation, Variable, exp, tanh, variables, where


def derivative(expression: Expression, name: str) -> Expression:
    """The derivative with respect to a variable, without terms that are 0 and factors that are 1.

    What is left out is left out for all values: at a score of -inf, 0 * score would be NaN.
    """
    if isinstance(expression, Variable):
        return Constant(1.0 if expression.name == name else 0.0)
    if not isinstance(expression, Operation) or expression.kind == BOOLEAN or name not in variables(expression):
        return Constant(0.0)
    rule = _DERIVATIVES.get(expression.name)
    if rule is None:
        raise TypeError(
            f"{expression.name} has no derivative; a score function may use + - * / tanh exp abs min max where"
        )
    return rule(expression.args, [derivative(arg, name) for arg in expression.args])


def _is(expression: Expression, value: float) -> bool:
    return isinstance(expression, Constant) and expression.value == value


def _sum(a: Expression, b: Expression) -> Expression:
    return b if _is(a, 0) else a if _is(b, 0) else a + b


def _less(a: Expression, b: Expression) -> Expression:
    return a if _is(b, 0) else -b if _is(a, 0) else a - b


def _times(a: Expression, b: Expression) -> Expression:
    if _is(a, 0) or _is(b, 0):
        return Constant(0.0)
    return b if _is(a, 1) else a if _is(b, 1) else a * b


def _over(a: Expression, b: Expression) -> Expression:
    return a if _is(a, 0) or _is(b, 1) else a / b


def _either(condition: Expression, a: Expression, b: Expression) -> Expression:
    alike = isinstance(a, Constant) and isinstance(b, Constant) and a.value == b.value
    return a if alike else where(condition, a, b)


def _of_chosen(first: Expression, second: Expression, d: Any) -> Expression:
    """The derivative of whichever of two is chosen, the one if `first` holds and the other if `second` does; where they
    are equal the mean, as torch has it."""
    mean = _times(Constant(0.5), _sum(d[0], d[1]))
    return _either(first, d[0], _either(second, d[1], mean))


_DERIVATIVES: dict[str, Callable[[Any, Any], Expression]] = {
    "add": lambda x, d: _sum(d[0], d[1]),
    "sub": lambda x, d: _less(d[0], d[1]),
    "mul": lambda x, d: _sum(_times(d[0], x[1]), _times(x[0], d[1])),
    "div": lambda x, d: _over(_less(d[0], _times(x[0] / x[1], d[1])), x[1]),
    "tanh": lambda x, d: _times(d[0], 1.0 - tanh(x[0]) * tanh(x[0])),
    "exp": lambda x, d: _times(d[0], exp(x[0])),
    "abs": lambda x, d: where(x[0] < 0, _less(Constant(0.0), d[0]), where(x[0] > 0, d[0], 0.0)),
    "min": lambda x, d: _of_chosen(x[0] < x[1], x[1] < x[0], d),
    "max": lambda x, d: _of_chosen(x[1] < x[0], x[0] < x[1], d),
    "where": lambda x, d: _either(x[0], d[1], d[2]),
}
