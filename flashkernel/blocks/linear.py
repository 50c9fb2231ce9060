"""Sums of variables and numbers inside expressions."""

from __future__ import annotations

from flashkernel.blocks.expression import Constant, Expression, Operation, Variable


def linear(node: Expression) -> dict[str, float] | None:
    """What each variable is multiplied by in a sum of variables and numbers (under ""); None for anything else."""
    if isinstance(node, Variable):
        return {node.name: 1}
    if isinstance(node, Constant):
        return {"": node.value}
    if not isinstance(node, Operation) or node.name not in ("add", "sub"):
        return None
    left, right = (linear(arg) for arg in node.args)
    return None if left is None or right is None else _sum(left, right, 1 if node.name == "add" else -1)


def _sum(left: dict[str, float], right: dict[str, float], sign: int) -> dict[str, float]:
    return {name: left.get(name, 0) + sign * right.get(name, 0) for name in left | right}


def difference(node: Expression) -> dict[str, float] | None:
    """left - right of a comparison, as in `linear`."""
    if not isinstance(node, Operation) or node.name not in ("lt", "le", "eq"):
        return None
    left, right = (linear(arg) for arg in node.args)
    return None if left is None or right is None else _sum(left, right, -1)
