"""Functions of indices, written once with Python's operators, that run in torch, in Triton and on intervals.

A mask such as `lambda b, h, q, k: (k <= q) & (q - k < 128)` is called once with variables; the operators build a
tree. The tree is evaluated by torch on index tensors (the ground truth), printed as Triton source for the kernels, and
evaluated on intervals of indices to learn of a whole tile whether nothing or everything in it is visible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

BOOLEAN, INTEGER, FLOAT = "condition", "integer", "float"  # kinds, as error messages call them
_WIDEST = 2**31  # integers are 32 bits wide in kernels, unless a table of int64 takes part


class Expression:
    """A condition or a number computed from indices; `kind` says which.

    Conditions compose with & | ~ and compare with == and !=. Where a number is expected, a condition counts as 1 or 0,
    as in Python. // and % round towards minus infinity, as in Python. & and | of integers are bitwise.
    """

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


@dataclass(frozen=True, eq=False)
class Variable(Expression):
    """b and h count batches and query heads, q and k positions; sq and sk are the lengths; score is q . k scaled."""

    name: str

    @property
    def kind(self) -> str:
        return FLOAT if self.name == "score" else INTEGER


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
        elif self.name in _FLOATS:
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
_FLOATS = ("div", "tanh", "exp")
_NARROW = (torch.uint8, torch.int8, torch.int16)
_READABLE = (
    torch.bool, *_NARROW, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
)  # fmt: skip


class Table:
    """A tensor that a traced function may index: `ids = Table(ids)`, then `ids[b, q] == ids[b, k]`."""

    def __init__(self, tensor: Tensor) -> None:
        if not isinstance(tensor, Tensor) or tensor.dtype not in _READABLE or tensor.ndim == 0:
            given = f"{tensor.dtype} {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(
                f"a Table is made of a tensor of one dim or more, of bool, uint8, int8 to int64 or float16 to float64, "
                f"not of {given}; convert it with .to(dtype), and write a single number as it is"
            )
        self.tensor = tensor

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


def lift(value: Any) -> Expression:
    """A Python number as an expression."""
    if isinstance(value, Expression):
        return value
    if isinstance(value, int) and not -_WIDEST <= value < _WIDEST:
        raise TypeError(f"{value} does not fit into 32 bits; write a float, {float(value)}")
    if isinstance(value, (bool, int, float)):
        return Constant(value)
    raise TypeError(
        f"{type(value).__name__} cannot stand in a traced function; use numbers, operators and Table(tensor)[index]"
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
    return Operation(name, (number(left), number(right)))


def _integer_division(name: str, sign: str, left: Any, right: Any) -> Expression:
    if isinstance(right, Constant):
        right = right.value
    if isinstance(right, bool) or not isinstance(right, int) or right <= 0:
        given = _kinds(right) if isinstance(right, Expression) else repr(right)
        raise TypeError(f"{sign} takes a positive integer on the right, not {given}")
    divided = number(left)
    if divided.kind != INTEGER:
        raise TypeError(f"{sign} takes an integer on the left, not {_kinds(divided)}; compare with / instead")
    return Operation(name, (divided, lift(right)))


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


def bind(expression: Expression, found: list[Tensor], given: list[Tensor]) -> Expression:
    """The same expression over other tensors: each of `found` is replaced by its counterpart in `given`."""
    if isinstance(expression, Gather):
        place = next(index for index, table in enumerate(found) if table is expression.table)
        return Gather(given[place], tuple(bind(index, found, given) for index in expression.indices))
    if isinstance(expression, Operation):
        return Operation(expression.name, tuple(bind(arg, found, given) for arg in expression.args))
    return expression


def where(condition: Any, a: Any, b: Any) -> Expression:
    """`a` where the condition holds, else `b`: what a traced function writes for if."""
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
    return Operation("abs", (number(value),))


def trace(function: Callable[..., Any] | Traced, *names: str) -> Expression:
    """Call a function with variables, and lift what it returns; what is traced already is taken as it is."""
    if isinstance(function, Traced):
        return function.expression
    return lift(function(*(Variable(name) for name in names)))


def trace_score(function: Callable[..., Any] | Traced) -> Expression:
    """The expression of a function of (score, b, h, q, k)."""
    found = trace(function, "score", "b", "h", "q", "k")
    if found.kind == BOOLEAN:
        raise TypeError("a score function returns a number, not a condition; pairs are hidden by mask=")
    return found


@dataclass(frozen=True, eq=False)
class Traced:
    """An expression with its Triton text and the tensors it reads.

    Both are worked out when it is made, so that torch.compile finds constants. The text names the expression to an
    operator that can take text and tensors but no Python objects: `recall` turns them into the expression again.
    """

    expression: Expression
    name: str = "function"

    def __post_init__(self) -> None:
        found = tables(self.expression)
        text = triton_source(self.expression, found)
        object.__setattr__(self, "tables", tuple(found))
        object.__setattr__(self, "text", text)
        if text not in _traced:
            blank = [torch.empty_like(table, device="meta") for table in found]
            _traced[text] = (bind(self.expression, found, blank), blank)

    tables: ClassVar[tuple[Tensor, ...]]
    text: ClassVar[str]


def score_function(function: Callable[..., Any]) -> Traced:
    """A function of (score, b, h, q, k) for attention's `score`, traced here and now: torch.compile needs it so."""
    return Traced(trace_score(function), "score")


_traced: dict[str, tuple[Expression, list[Tensor]]] = {}  # text -> expression over tensors without memory


def recall(text: str, given: Sequence[Tensor]) -> Expression:
    """The expression that a text names, over these tensors."""
    template, blank = _traced[text]
    return bind(template, blank, list(given)) if blank else template


def variables(expression: Expression) -> set[str]:
    """The names of the variables an expression depends on."""
    if isinstance(expression, Variable):
        return {expression.name}
    return set().union(*(variables(child) for child in children(expression)))


def children(expression: Expression) -> tuple[Expression, ...]:
    if isinstance(expression, Operation):
        return expression.args
    return expression.indices if isinstance(expression, Gather) else ()


def tables(expression: Expression) -> list[Tensor]:
    """The tensors an expression reads, each once, in the order a depth-first walk meets them."""
    found: list[Tensor] = []
    _find_tables(expression, found)
    return found


def _find_tables(node: Expression, found: list[Tensor]) -> None:
    """Not a closure, which would refer to itself and so keep the tensors until the garbage collector runs."""
    if isinstance(node, Gather) and not any(node.table is table for table in found):
        found.append(node.table)
    for child in children(node):
        _find_tables(child, found)


_TORCH: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "floordiv": lambda a, b: a // b,
    "mod": lambda a, b: a % b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "eq": lambda a, b: a == b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "not": lambda a: ~a if isinstance(a, Tensor) else not a,
    "bitand": lambda a, b: a & b,
    "bitor": lambda a, b: a | b,
    "min": lambda a, b: torch.minimum(*as_tensors(a, b)),
    "max": lambda a, b: torch.maximum(*as_tensors(a, b)),
    "where": lambda c, a, b: torch.where(c, *as_tensors(a, b)) if isinstance(c, Tensor) else a if c else b,
    "tanh": lambda a: torch.tanh(torch.as_tensor(a)),
    "exp": lambda a: torch.exp(torch.as_tensor(a)),
    "abs": lambda a: abs(a),
}


def as_tensors(a: Any, b: Any) -> tuple[Tensor, Tensor]:
    """Both as tensors, on the device of whichever is one."""
    device = next((value.device for value in (a, b) if isinstance(value, Tensor)), None)
    return torch.as_tensor(a, device=device), torch.as_tensor(b, device=device)


def read_dtype(table: Tensor) -> torch.dtype:
    """What a table's elements are computed with."""
    if table.dtype in _NARROW:
        return torch.int32
    return torch.float32 if table.dtype.is_floating_point else table.dtype


def evaluate(expression: Expression, values: Mapping[str, Any]) -> Any:
    """The value in torch: a tensor that broadcasts over those given for the variables, or a plain number."""
    if isinstance(expression, Variable):
        return values[expression.name]
    if isinstance(expression, Constant):
        return expression.value
    if isinstance(expression, Gather):
        indices = [torch.as_tensor(evaluate(index, values)).to(expression.table.device) for index in expression.indices]
        inside = torch.ones((), dtype=torch.bool, device=expression.table.device)
        for index, size in zip(indices, expression.table.shape):
            inside = inside & (index >= 0) & (index < size)
        limits = [index.clamp(0, max(0, size - 1)) for index, size in zip(indices, expression.table.shape)]
        if expression.table.numel() == 0:
            return torch.zeros_like(inside, dtype=read_dtype(expression.table))
        found = expression.table[tuple(torch.broadcast_tensors(*limits))].to(read_dtype(expression.table))
        return torch.where(inside, found, torch.zeros((), dtype=found.dtype, device=found.device))
    assert isinstance(expression, Operation)
    return _TORCH[expression.name](*(evaluate(arg, values) for arg in expression.args))


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
    if isinstance(expression, Variable):
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
        for place, (one, other) in enumerate((args, args[::-1])):
            small = isinstance(other, Constant) and other.kind == INTEGER and 0 <= other.value < 128
            if small and isinstance(one, Gather) and one.table.dtype in _NARROW:  # no need to widen
                texts[place] = _load_source(one, found)
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
    place, dims = sum(1 + 2 * one.ndim for one in before), table.ndim
    indices = [triton_source(index, found) for index in gather.indices]
    inside = " & ".join(f"({index} >= 0) & ({index} < tables[{place + 1 + dim}])" for dim, index in enumerate(indices))
    if sum((size - 1) * stride for size, stride in zip(table.shape, table.stride())) >= _WIDEST:
        indices = [f"tl.cast({index}, tl.int64)" for index in indices]
    offset = " + ".join(f"{index} * tables[{place + 1 + dims + dim}]" for dim, index in enumerate(indices))
    return f"tl.load(tables[{place}] + ({offset}), mask={inside}, other=0)"


def _division_source(expression: Operation, dividend: str) -> str:
    """// or %, rounded towards minus infinity; Triton rounds towards zero, which is the same where nothing is negative.

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


def _of_lower(low: Expression, high: Expression, dlow: Expression, dhigh: Expression) -> Expression:
    """The derivative of whichever of two is lower; where they are equal the mean, as torch has it."""
    mean = _times(Constant(0.5), _sum(dlow, dhigh))
    return _either(low < high, dlow, _either(high < low, dhigh, mean))


_DERIVATIVES: dict[str, Callable[[Any, Any], Expression]] = {
    "add": lambda x, d: _sum(d[0], d[1]),
    "sub": lambda x, d: _less(d[0], d[1]),
    "mul": lambda x, d: _sum(_times(d[0], x[1]), _times(x[0], d[1])),
    "div": lambda x, d: _over(_less(d[0], _times(x[0] / x[1], d[1])), x[1]),
    "tanh": lambda x, d: _times(d[0], 1.0 - tanh(x[0]) * tanh(x[0])),
    "exp": lambda x, d: _times(d[0], exp(x[0])),
    "abs": lambda x, d: where(x[0] < 0, _less(Constant(0.0), d[0]), where(x[0] > 0, d[0], 0.0)),
    "min": lambda x, d: _of_lower(x[0], x[1], d[0], d[1]),
    "max": lambda x, d: _of_lower(x[1], x[0], d[1], d[0]),
    "where": lambda x, d: _either(x[0], d[1], d[2]),
}
