"""Expressions as Triton text."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks.nodes import (
    FLOAT,
    INTEGER,
    NARROW,
    WIDEST,
    Constant,
    Expression,
    Gather,
    Local,
    Operation,
    Variable,
    read_dtype,
    variables,
)

_TRITON = {
    "add": "({} + {})",
    "sub": "({} - {})",
    "mul": "({} * {})",
    "div": "({} / {})",
    "lt": "({} < {})",
    "le": "({} <= {})",
    "eq": "({} == {})",
    "and": "({} & {})",
    "or": "({} | {})",
    "not": "({} == 0)",
    "bitand": "({} & {})",
    "bitor": "({} | {})",
    "min": "tl.minimum({}, {})",
    "max": "tl.maximum({}, {})",
    "where": "tl.where({}, {}, {})",
    "tanh": "(2 * tl.sigmoid(2 * {}) - 1)",
    "exp": "tl.exp({})",
    "abs": "tl.abs({})",
}
_TRITON_DTYPES = {torch.bool: "tl.int1", torch.int32: "tl.int32", torch.float32: "tl.float32"}


def table_arguments(found: list[Tensor]) -> tuple[Any, ...]:
    """The kernel argument `tables`: for each tensor its pointer, its sizes and its strides."""
    return tuple(value for table in found for value in (table, *table.shape, *table.stride()))


def triton_source(expression: Expression, found: list[Tensor]) -> str:
    """The expression as Triton text over the variables' names and `tables`, the arguments for the tensors of `found`.

    Equal texts over tables of equal dtypes are equal functions. The text serves Gluon kernels too.
    """
    if isinstance(expression, (Variable, Local)):
        return expression.name
    if isinstance(expression, Constant):
        value = expression.value
        special = isinstance(value, float) and (value != value or value in (math.inf, -math.inf))
        return f'float("{value}")' if special else repr(value)
    if isinstance(expression, Gather):
        read = read_dtype(expression.table)
        text = _load_source(expression, found)
        return text if read == expression.table.dtype != torch.bool else f"tl.cast({text}, {_TRITON_DTYPES[read]})"
    assert isinstance(expression, Operation)
    args, name = expression.args, expression.name
    texts = [triton_source(arg, found) for arg in args]
    if name in ("floordiv", "mod"):
        return _division_source(expression, texts[0])
    if name in ("lt", "le", "eq"):
        for side, (one, other) in enumerate((args, args[::-1])):
            small = isinstance(other, Constant) and other.kind == INTEGER and 0 <= other.value < 128
            if small and isinstance(one, Gather) and one.table.dtype in NARROW:  # no need to widen
                texts[side] = _load_source(one, found)
    if name in ("tanh", "exp", "abs") and (name != "abs" or not variables(args[0]) - {"sq", "sk"}):
        # Triton has no tanh and exp of integers, and lengths of 1 may be known when it compiles: no tensors.
        texts = [f"tl.cast({texts[0]}, {'tl.float32' if name != 'abs' or args[0].kind == FLOAT else 'tl.int32'})"]
    if name in ("min", "max") and expression.kind == FLOAT:
        return f"tl.{name}imum({texts[0]}, {texts[1]}, propagate_nan=tl.PropagateNan.ALL)"  # as torch does
    return _TRITON[name].format(*texts)


def score_source(expression: Expression, found: list[Tensor]) -> str:
    """A score function as Triton text, of the shape of a tile of scores and in float32 even where it is simpler."""
    text = triton_source(expression, found)
    seen = variables(expression)
    whole = expression.kind == FLOAT and ("score" in seen or {"q", "k"} <= seen)
    return text if whole else f"(tl.zeros_like(score) + {text})"


def _load_source(gather: Gather, found: list[Tensor]) -> str:
    table = gather.table
    before = found[: next(index for index, one in enumerate(found) if one is table)]
    start, dims = sum(1 + 2 * one.ndim for one in before), table.ndim
    indices = [triton_source(index, found) for index in gather.indices]
    inside = " & ".join(f"({index} >= 0) & ({index} < tables[{start + 1 + dim}])" for dim, index in enumerate(indices))
    if sum((size - 1) * stride for size, stride in zip(table.shape, table.stride())) >= WIDEST:
        indices = [f"tl.cast({index}, tl.int64)" for index in indices]
    offset = " + ".join(f"{index} * tables[{start + 1 + dims + dim}]" for dim, index in enumerate(indices))
    return f"tl.load(tables[{start}] + ({offset}), mask={inside}, other=0)"


def _division_source(expression: Operation, dividend: str) -> str:
    """// or %, rounded toward minus infinity; Triton rounds toward zero, which is the same where nothing is negative.

    Two's complement makes shifts and bitwise and the right ones for powers of two.
    """
    divisor = expression.args[1]
    assert isinstance(divisor, Constant)
    by, floor = int(divisor.value), expression.name == "floordiv"
    if nonnegative(expression.args[0]):
        return f"({dividend} {'//' if floor else '%'} {by})"
    if by & (by - 1) == 0:
        return f"({dividend} >> {by.bit_length() - 1})" if floor else f"({dividend} & {by - 1})"
    remainder = f"(({dividend} % {by} + {by}) % {by})"
    return f"(({dividend} - {remainder}) // {by})" if floor else remainder


def nonnegative(expression: Expression) -> bool:
    """Whether an integer is known not to be negative. Indices are not, nor are lengths.

    A kernel may move q and k of a mask that looks at their differences alone below zero (`Mask.relative`): no such mask
    divides q or k itself, so what is said of a dividend stays true.
    """
    if isinstance(expression, Variable):
        return True
    if isinstance(expression, Constant):
        return expression.value >= 0
    if isinstance(expression, Local):
        return False  # it is not known to be
    if isinstance(expression, Gather):
        return expression.table.dtype in (torch.bool, torch.uint8)
    assert isinstance(expression, Operation)
    args, name = expression.args, expression.name
    if name in ("abs", "mod"):
        return True
    if name in ("add", "mul", "min", "bitor"):
        return nonnegative(args[0]) and nonnegative(args[1])
    if name in ("max", "bitand"):
        return nonnegative(args[0]) or nonnegative(args[1])
    if name == "where":
        return nonnegative(args[1]) and nonnegative(args[2])
    return name == "floordiv" and nonnegative(args[0])
