"""Masks that packed sequences have: an interval around each query's position, within its document."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from flashkernel.blocks.expression import Expression, Gather, Operation, Variable
from flashkernel.blocks.linear import difference, linear

_POSITION = ({"q": 1}, {"q": 1, "sk": 1, "sq": -1})


class PackedForm(NamedTuple):
    """A query sees from `left` keys before the one it is aligned with to `right` behind it (None: all), of its own
    document where there are `ids`, (positions,) or (batch, positions).

    `aligned` is True if the last query is aligned with the last key wherever it matters, False if the first one is with
    the first; None if nothing depends on it. For as many queries as keys they are the same.
    """

    left: int | None
    right: int | None
    ids: Tensor | None
    aligned: bool | None


def packed_form(expression: Expression) -> PackedForm | None:
    """The condition in this form; None for any other."""
    sides: dict[str, int] = {}
    ids: list[Tensor] = []
    alignments: set[bool] = set()
    for part in _conjunction(expression):
        if not (_read_side(part, sides, alignments) or _read_documents(part, ids)):
            return None
    if any(side < 0 for side in sides.values()) or len(alignments) > 1 or any(one is not ids[0] for one in ids):
        return None
    return PackedForm(
        sides.get("left"), sides.get("right"), ids[0] if ids else None, next(iter(alignments), None)
    )  # fmt: skip


def _conjunction(node: Expression) -> list[Expression]:
    if isinstance(node, Operation) and node.name == "and":
        return [part for arg in node.args for part in _conjunction(arg)]
    return [node]


def _read_side(node: Expression, sides: dict[str, int], alignments: set[bool]) -> bool:
    """Whether a comparison limits the distance of key and position; notes the limit."""
    form = difference(node)
    if form is None or not isinstance(node, Operation) or node.name == "eq":
        return False
    constant = form.pop("", 0)
    form = {name: by for name, by in form.items() if by}
    if not isinstance(constant, int) or set(form) not in ({"q", "k"}, {"q", "k", "sq", "sk"}):
        return False
    sign = form["k"]
    if sign not in (1, -1) or form["q"] != -sign or form.get("sk", -sign) != -sign or form.get("sq", sign) != sign:
        return False
    limit = -constant - (1 if node.name == "lt" else 0)  # sign * (key - position) <= limit
    name = "right" if sign == 1 else "left"
    sides[name] = min(sides.get(name, limit), limit)
    alignments.add("sk" in form)
    return True


def _read_documents(node: Expression, ids: list[Tensor]) -> bool:
    """Whether a condition says that query and key have the same entry of one table; notes the table."""
    if not isinstance(node, Operation) or node.name != "eq":
        return False
    first, second = node.args
    if not isinstance(first, Gather) or not isinstance(second, Gather) or first.table is not second.table:
        return False
    if first.table.is_floating_point() or len(first.indices) not in (1, 2):
        return False
    if len(first.indices) == 2 and not all(_is_batch(one.indices[0]) for one in (first, second)):
        return False
    positions = [_plain(linear(one.indices[-1])) for one in (first, second)]
    if {"k": 1} not in positions or not any(position in _POSITION for position in positions):
        return False
    ids.append(first.table)
    return True


def _is_batch(index: Expression) -> bool:
    return isinstance(index, Variable) and index.name == "b"


def _plain(form: dict[str, float] | None) -> dict[str, float] | None:
    return None if form is None else {name: by for name, by in form.items() if by}
