"""Expressions: the trees that Python's operators build when a mask or score function is called with variables.

An expression has a kind: condition, integer or float. What the kinds forbid is refused here, when the function is
traced; whatever is built runs in torch, in Triton and on intervals alike.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from flashkernel.core.argument_types import plain_number
from flashkernel.core.arguments import static

BOOLEAN, INTEGER, FLOAT = "condition", "integer", "float"  # kinds, as error messages call them
WIDEST = 2**31  # integers are 32 bits wide in kernels, unless a table of int64 takes part


TORCH_FUNCTIONS: dict[Any, Callable[..., Any]] = {}  # what they are of expressions (blocks/torch_functions.py)


class Expression:
    """A condition or a number computed from indices; `kind` says which.

    Conditions compose with & | ~ and compare with == and !=. Where a number is expected, a condition counts as 1 or 0,
    as in Python. // and % round toward minus infinity, as in Python. & and | of integers are bitwise.
    """

    __array_ufunc__ = None  # NumPy's numbers leave their operators to this class

    @property
    def kind(self) -> str:
        raise NotImplementedError

    def __add__(self, other: Any) -> Expression:
        return _arithmetic("add", self, other)

    def __radd__(self, other: Any) -> Expression:
        return _arithmetic("add", other, self)

    def __sub__(self, other: Any) -> Expression:
        return _arithmetic("sub", self, other)

    def __rsub__(self, other: Any) -> Expression:
        return _arithmetic("sub", other, self)

    def __mul__(self, other: Any) -> Expression:
        return _arithmetic("mul", self, other)

    def __rmul__(self, other: Any) -> Expression:
        return _arithmetic("mul", other, self)

    def __truediv__(self, other: Any) -> Expression:
        return _arithmetic("div", self, other)

    def __rtruediv__(self, other: Any) -> Expression:
        return _arithmetic("div", other, self)

    def __floordiv__(self, other: Any) -> Expression:
        return _integer_division("floordiv", "//", self, other)

    def __rfloordiv__(self, other: Any) -> Expression:
        return _integer_division("floordiv", "//", other, self)

    def __mod__(self, other: Any) -> Expression:
        return _integer_division("mod", "%", self, other)

    def __rmod__(self, other: Any) -> Expression:
        return _integer_division("mod", "%", other, self)

    def __neg__(self) -> Expression:
        return _arithmetic("sub", 0, self)

    def __pos__(self) -> Expression:
        return number(self)

    def __abs__(self) -> Expression:
        return absolute(self)

    def __lt__(self, other: Any) -> Expression:
        return _arithmetic("lt", self, other)

    def __le__(self, other: Any) -> Expression:
        return _arithmetic("le", self, other)

    def __gt__(self, other: Any) -> Expression:
        return _arithmetic("lt", other, self)

    def __ge__(self, other: Any) -> Expression:
        return _arithmetic("le", other, self)

    def __eq__(self, other: object) -> Any:
        return _equal(self, lift(other))

    def __ne__(self, other: object) -> Any:
        return _negated(_equal(self, lift(other)))

    def __and__(self, other: Any) -> Expression:
        return _both("and", "&", self, lift(other))

    __rand__ = __and__

    def __or__(self, other: Any) -> Expression:
        return _both("or", "|", self, lift(other))

    __ror__ = __or__

    def __xor__(self, other: Any) -> Expression:
        other = lift(other)
        if self.kind != BOOLEAN or other.kind != BOOLEAN:
            raise TypeError(f"^ takes two conditions, not {_kinds(self, other)}; numbers have no ^ here")
        return _negated(_equal(self, other))

    __rxor__ = __xor__

    def __invert__(self) -> Expression:
        return self.logical_not()

    def logical_not(self) -> Expression:
        """`~` by a name, for functions under torch.compile, which cannot trace the operator."""
        if self.kind != BOOLEAN:
            raise TypeError(f"~ takes a condition, not {_kinds(self)}; write x == 0 for a number x")
        return _negated(self)

    def __bool__(self) -> bool:
        raise TypeError(
            "the function is called once, with variables in place of indices, so it cannot branch on them; write & for "
            "and, | for or, ~ for not, (a < b) & (b < c) for a < b < c, flashkernel.where(condition, a, b) for if, and "
            "flashkernel.where(a < b, a, b) for min(a, b)"
        )

    def __hash__(self) -> int:
        return id(self)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """`tensor[index]`, torch.where and others, as functions for FlexAttention are written."""
        build = TORCH_FUNCTIONS.get(function)
        if build is None or kwargs:
            name = getattr(function, "__name__", str(function))
            known = [f"torch.{one.__name__}" for one in TORCH_FUNCTIONS if one is not Tensor.__getitem__]
            raise TypeError(
                f"{name}{f' with {next(iter(kwargs))}=' if kwargs else ''} cannot stand in a traced function; of torch "
                f"there are tensor[index], {', '.join(known)}"
            )
        return build(*args)


@dataclass(frozen=True, eq=False)
class Variable(Expression):
    """b and h count batches and query heads, q and k positions; sq and sk are the lengths; score is q . k scaled."""

    name: str

    @property
    def kind(self) -> str:
        return FLOAT if self.name == "score" else INTEGER


@dataclass(frozen=True, eq=False)
class Local(Expression):
    """A value that generated source has given a name."""

    name: str
    kind: str = INTEGER  # type: ignore[misc]


@dataclass(frozen=True, eq=False)
class Constant(Expression):
    value: float | int | bool

    @property
    def kind(self) -> str:
        return BOOLEAN if isinstance(self.value, bool) else FLOAT if isinstance(self.value, float) else INTEGER


@dataclass(frozen=True, eq=False)
class Gather(Expression):
    """table[indices]; reads outside the table give 0. Narrow integers are read as int32, all floats as float32."""

    table: Tensor
    indices: tuple[Expression, ...]

    @property
    def kind(self) -> str:
        dtype = self.table.dtype
        return BOOLEAN if dtype == torch.bool else FLOAT if dtype.is_floating_point else INTEGER


@dataclass(frozen=True, eq=False)
class Operation(Expression):
    name: str
    args: tuple[Expression, ...]

    @property
    def kind(self) -> str:
        return self._kind

    def __post_init__(self) -> None:
        if self.name in _CONDITIONS:
            kind = BOOLEAN
        elif self.name in FLOATS:
            kind = FLOAT
        elif self.name == "where" and self.args[1].kind == BOOLEAN:
            kind = BOOLEAN
        else:  # a number: a float where any argument is one
            kind = INTEGER
            for arg in self.args:
                if arg.kind == FLOAT:
                    kind = FLOAT
        object.__setattr__(self, "_kind", kind)

    _kind: ClassVar[str]


_CONDITIONS = ("lt", "le", "eq", "and", "or", "not")
FLOATS = ("div", "tanh", "exp")  # of integers too
_OF_CONSTANTS: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "floordiv": operator.floordiv, "mod": operator.mod,
    "lt": operator.lt, "le": operator.le, "eq": operator.eq,
    "min": lambda a, b: a if a != a or a < b else b, "max": lambda a, b: a if a != a or a > b else b,
    "div": lambda a, b: a / b if b else math.copysign(math.inf, a) if a else math.nan,
}  # fmt: skip
NARROW = (torch.uint8, torch.int8, torch.int16)
INTEGERS = (*NARROW, torch.int32, torch.int64)
_READABLE = (
    torch.bool, *INTEGERS, torch.float16, torch.bfloat16, torch.float32, torch.float64,
)  # fmt: skip


class Table:
    """A tensor that masks and score functions may index.

    Args:
        tensor: bool, uint8, int8 to int64, or float16 to float64, of one dim or more. It is not copied.

    Example:
        >>> import torch
        >>> import flashkernel as fk
        >>> ids = fk.Table(torch.tensor([0, 0, 1]))
        >>> same = fk.custom(lambda b, h, q, k: ids[q] == ids[k])
        >>> same.visible(1, 1, 3, 3)[0, 0].int().tolist()
        [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    """

    def __init__(self, tensor: Tensor) -> None:
        if not isinstance(tensor, Tensor) or tensor.dtype not in _READABLE or tensor.ndim == 0:
            given = f"{tensor.dtype} {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(
                f"a Table is made of a tensor of one dim or more, of bool, uint8, int8 to int64 or float16 to float64, "
                f"not of {given}; convert it with .to(dtype), and write a single number as it is"
            )
        self.tensor = tensor.resolve_neg()

    def __getitem__(self, indices: Any) -> Gather:
        given = indices if isinstance(indices, tuple) else (indices,)
        if len(given) != self.tensor.ndim:
            raise IndexError(f"a table of {self.tensor.ndim} dims was indexed by {len(given)}; give every index")
        lifted = tuple([lift(index) for index in given])
        for index in lifted:
            if index.kind != INTEGER:
                raise TypeError(
                    f"a table is indexed by integers, not by {_kinds(index)}; write // for a division, and "
                    "flashkernel.where(condition, 1, 0) for a condition"
                )
        return Gather(self.tensor, lifted)


class TooWide(TypeError):
    """A constant that does not fit into 32 bits."""


def lift(value: Any) -> Expression:
    """A Python number as an expression."""
    if isinstance(value, Expression):
        return value
    value = plain_number(value)
    if isinstance(value, (int, float)):
        value = static(value)
    if isinstance(value, int) and not -WIDEST <= value < WIDEST:
        raise TooWide(f"{value} does not fit into 32 bits; write a float, {float(value)}")
    if isinstance(value, (bool, int, float)):
        return Constant(value)
    raise TypeError(
        f"{type(value).__name__} cannot stand in a traced function; use numbers, operators and tensor[index]"
    )


def number(value: Any) -> Expression:
    """An expression that is a number: a condition becomes 1 or 0."""
    lifted = lift(value)
    if lifted.kind != BOOLEAN:
        return lifted
    return Constant(int(lifted.value)) if isinstance(lifted, Constant) else where(lifted, 1, 0)


def _kinds(*expressions: Expression) -> str:
    """Kinds for an error message: "an integer and a condition"."""
    return " and ".join(f"{'an' if one.kind == INTEGER else 'a'} {one.kind}" for one in expressions)


def _arithmetic(name: str, left: Any, right: Any) -> Expression:
    a, b = number(left), number(right)
    if isinstance(a, Constant) and isinstance(b, Constant) and name in _OF_CONSTANTS:
        return lift(_OF_CONSTANTS[name](a.value, b.value))
    return Operation(name, (a, b))


def _integer_division(name: str, sign: str, left: Any, right: Any) -> Expression:
    if isinstance(right, Constant):
        right = right.value
    right = plain_number(right)
    if isinstance(right, bool) or not isinstance(right, int) or right <= 0:
        given = _kinds(right) if isinstance(right, Expression) else repr(right)
        raise TypeError(f"{sign} takes a positive integer on the right, not {given}")
    divided = number(left)
    if divided.kind != INTEGER:
        raise TypeError(f"{sign} takes an integer on the left, not {_kinds(divided)}; compare with / instead")
    return _arithmetic(name, divided, right)


def _negated(condition: Expression) -> Expression:
    return Constant(not condition.value) if isinstance(condition, Constant) else Operation("not", (condition,))


def _equal(left: Expression, right: Expression) -> Expression:
    if left.kind == BOOLEAN or right.kind == BOOLEAN:
        for one, other in ((left, right), (right, left)):
            if one.kind == BOOLEAN and isinstance(other, Constant) and other.value in (0, 1):
                return one if other.value else _negated(one)
    if left.kind == right.kind == BOOLEAN:
        return Operation("eq", (left, right))
    return _arithmetic("eq", left, right)


def _both(name: str, sign: str, left: Expression, right: Expression) -> Expression:
    """left & right or left | right: of two conditions, without constants that do not matter, or of two integers."""
    if left.kind == right.kind == INTEGER:
        return Operation(f"bit{name}", (left, right))
    if left.kind != BOOLEAN or right.kind != BOOLEAN:
        raise TypeError(
            f"{sign} takes two conditions or two integers, not {_kinds(left, right)}; write x != 0 to make a condition "
            f"of a number x, and mind that {sign} binds tighter than < and ==: (a < b) {sign} (c < d)"
        )
    for one, other in ((left, right), (right, left)):
        if isinstance(one, Constant):
            return other if one.value is (name == "and") else one
    return Operation(name, (left, right))


def where(condition: Any, a: Any, b: Any) -> Expression:
    """`a` where the condition holds, else `b`: what a mask or a score function writes instead of `if`.

    Args:
        condition: a condition of the function's arguments.
        a: a number or an expression.
        b: a number or an expression.

    Returns:
        An expression.

    Example:
        >>> import flashkernel as fk
        >>> mask = fk.custom(lambda b, h, q, k: fk.where(h == 0, k <= q, k >= q))
        >>> mask.visible(1, 2, 2, 2)[0].int().tolist()
        [[[1, 0], [1, 1]], [[1, 1], [0, 1]]]
    """
    test, left, right = lift(condition), lift(a), lift(b)
    if test.kind != BOOLEAN:
        raise TypeError(f"where takes a condition first, not {_kinds(test)}; write x != 0 for a number x")
    if left.kind != BOOLEAN or right.kind != BOOLEAN:
        left, right = number(left), number(right)
    if isinstance(test, Constant):
        return left if test.value else right
    return Operation("where", (test, left, right))


def minimum(a: Any, b: Any) -> Expression:
    left, right = lift(a), lift(b)
    return left & right if left.kind == right.kind == BOOLEAN else _arithmetic("min", left, right)


def maximum(a: Any, b: Any) -> Expression:
    left, right = lift(a), lift(b)
    return left | right if left.kind == right.kind == BOOLEAN else _arithmetic("max", left, right)


def tanh(value: Any) -> Expression:
    return Operation("tanh", (number(value),))


def exp(value: Any) -> Expression:
    return Operation("exp", (number(value),))


def absolute(value: Any) -> Expression:
    given = number(value)
    return Constant(abs(given.value)) if isinstance(given, Constant) else Operation("abs", (given,))


def variables(expression: Expression) -> set[str]:
    """The names of the variables an expression depends on."""
    if isinstance(expression, Variable):
        return {expression.name}
    return set().union(*(variables(child) for child in children(expression)))


def children(expression: Expression) -> tuple[Expression, ...]:
    if isinstance(expression, Operation):
        return expression.args
    return expression.indices if isinstance(expression, Gather) else ()


def read_dtype(table: Tensor) -> torch.dtype:
    """What a table's elements are computed with."""
    if table.dtype in NARROW:
        return torch.int32
    return torch.float32 if table.dtype.is_floating_point else table.dtype
