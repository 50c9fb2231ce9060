"""Functions of indices, written once with Python's operators, that run in torch, in Triton and on intervals.

A mask such as `lambda b, h, q, k: (k <= q) & (q - k < 128)` is called once with variables; the operators build a
tree. The tree is evaluated by torch on index tensors (the ground truth), printed as Triton source for the kernels, and
evaluated on intervals of indices to learn of a whole tile whether nothing or everything in it is visible.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from flashkernel.core.arguments import static


class Expression:
    """A number or a truth value computed from indices."""

    def __add__(self, other: Any) -> Expression:
        return Operation("add", (self, lift(other)))

    def __radd__(self, other: Any) -> Expression:
        return Operation("add", (lift(other), self))

    def __sub__(self, other: Any) -> Expression:
        return Operation("sub", (self, lift(other)))

    def __rsub__(self, other: Any) -> Expression:
        return Operation("sub", (lift(other), self))

    def __mul__(self, other: Any) -> Expression:
        return Operation("mul", (self, lift(other)))

    def __rmul__(self, other: Any) -> Expression:
        return Operation("mul", (lift(other), self))

    def __truediv__(self, other: Any) -> Expression:
        return Operation("div", (self, lift(other)))

    def __rtruediv__(self, other: Any) -> Expression:
        return Operation("div", (lift(other), self))

    def __floordiv__(self, other: Any) -> Expression:
        return Operation("floordiv", (self, _positive(other)))

    def __mod__(self, other: Any) -> Expression:
        return Operation("mod", (self, _positive(other)))

    def __neg__(self) -> Expression:
        return Operation("sub", (Constant(0), self))

    def __lt__(self, other: Any) -> Expression:
        return Operation("lt", (self, lift(other)))

    def __le__(self, other: Any) -> Expression:
        return Operation("le", (self, lift(other)))

    def __gt__(self, other: Any) -> Expression:
        return Operation("lt", (lift(other), self))

    def __ge__(self, other: Any) -> Expression:
        return Operation("le", (lift(other), self))

    def __eq__(self, other: object) -> Any:
        return Operation("eq", (self, lift(other)))

    def __ne__(self, other: object) -> Any:
        return Operation("not", (Operation("eq", (self, lift(other))),))

    def __and__(self, other: Any) -> Expression:
        return Operation("and", (self, lift(other)))

    __rand__ = __and__

    def __or__(self, other: Any) -> Expression:
        return Operation("or", (self, lift(other)))

    __ror__ = __or__

    def __invert__(self) -> Expression:
        return Operation("not", (self,))

    def logical_not(self) -> Expression:
        """`~` by a name, for functions under torch.compile, which cannot trace the operator."""
        return Operation("not", (self,))

    def __bool__(self) -> bool:
        raise TypeError(
            "the function is called once, with variables in place of indices, so it cannot branch on them; write & for "
            "and, | for or, ~ for not, and flashkernel.where(condition, a, b) for if"
        )

    def __hash__(self) -> int:
        return id(self)


@dataclass(frozen=True, eq=False)
class Variable(Expression):
    """b and h count batches and query heads, q and k positions; sq and sk are the lengths; score is q . k scaled."""

    name: str


@dataclass(frozen=True, eq=False)
class Constant(Expression):
    value: float | int | bool


@dataclass(frozen=True, eq=False)
class Gather(Expression):
    """table[indices]; reads outside the table give 0."""

    table: Tensor
    indices: tuple[Expression, ...]


@dataclass(frozen=True, eq=False)
class Operation(Expression):
    name: str
    args: tuple[Expression, ...]


class Table:
    """A tensor that a traced function may index: `ids = Table(ids)`, then `ids[b, q] == ids[b, k]`."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __getitem__(self, indices: Any) -> Gather:
        given = indices if isinstance(indices, tuple) else (indices,)
        if len(given) != self.tensor.ndim:
            raise IndexError(f"a table of {self.tensor.ndim} dims was indexed by {len(given)}; give every index")
        return Gather(self.tensor, tuple(lift(index) for index in given))


def lift(value: Any) -> Expression:
    """A Python number as an expression."""
    if isinstance(value, Expression):
        return value
    if isinstance(value, (bool, int, float)):
        return Constant(static(value))
    raise TypeError(f"{value!r} cannot stand in a traced function; use numbers, operators and Table(tensor)[index]")


def _positive(value: Any) -> Expression:
    if not isinstance(value, int) or value <= 0:
        raise TypeError(f"// and % take a positive integer on the right, not {value!r}")
    return Constant(static(value))


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
    return Operation("where", (lift(condition), lift(a), lift(b)))


def minimum(a: Any, b: Any) -> Expression:
    return Operation("min", (lift(a), lift(b)))


def maximum(a: Any, b: Any) -> Expression:
    return Operation("max", (lift(a), lift(b)))


def tanh(value: Any) -> Expression:
    return Operation("tanh", (lift(value),))


def exp(value: Any) -> Expression:
    return Operation("exp", (lift(value),))


def absolute(value: Any) -> Expression:
    return Operation("abs", (lift(value),))


def trace(function: Callable[..., Any] | Traced, *names: str) -> Expression:
    """Call a function with variables, and lift what it returns; what is traced already is taken as it is."""
    if isinstance(function, Traced):
        return function.expression
    return lift(function(*(Variable(name) for name in names)))


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
        if torch.compiler.is_compiling() or text not in _traced:
            _register(text, _encode(self.expression, found))

    tables: ClassVar[tuple[Tensor, ...]]
    text: ClassVar[str]


def score_function(function: Callable[..., Any]) -> Traced:
    """A function of (score, b, h, q, k) for attention's `score`, traced here and now: torch.compile needs it so."""
    return Traced(trace(function, "score", "b", "h", "q", "k"), "score")


_traced: dict[str, tuple[Any, ...]] = {}  # text -> encoded expression


@torch.compiler.assume_constant_result
def _register(text: str, encoded: tuple[Any, ...]) -> bool:
    """Lets `recall` find an expression. A compiler that traces the call runs it then, not with the graph: the graph's
    operators recall what was traced inside it."""
    _traced.setdefault(text, encoded)
    return True


def _encode(node: Expression, found: list[Tensor]) -> tuple[Any, ...]:
    """An expression as nested tuples of plain values; a table is its place in `found`."""
    if isinstance(node, Variable):
        return "variable", node.name
    if isinstance(node, Constant):
        return "constant", node.value
    if isinstance(node, Gather):
        place = next(index for index, table in enumerate(found) if table is node.table)
        return "gather", place, tuple([_encode(index, found) for index in node.indices])
    assert isinstance(node, Operation)
    return "operation", node.name, tuple([_encode(arg, found) for arg in node.args])


def _decode(encoded: tuple[Any, ...], given: Sequence[Tensor]) -> Expression:
    kind, value, *rest = encoded
    if kind == "variable":
        return Variable(value)
    if kind == "constant":
        return Constant(value)
    args = tuple(_decode(one, given) for one in rest[0])
    return Gather(given[value], args) if kind == "gather" else Operation(value, args)


def recall(text: str, given: Sequence[Tensor]) -> Expression:
    """The expression that a text names, over these tensors."""
    return _decode(_traced[text], given) if given else _recalled(text)


@functools.lru_cache(maxsize=1024)
def _recalled(text: str) -> Expression:
    return _decode(_traced[text], ())


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
    "min": lambda a, b: torch.minimum(*as_tensors(a, b)),
    "max": lambda a, b: torch.maximum(*as_tensors(a, b)),
    "where": lambda c, a, b: torch.where(torch.as_tensor(c), *as_tensors(a, b)),
    "tanh": lambda a: torch.tanh(a),
    "exp": lambda a: torch.exp(a),
    "abs": lambda a: abs(a),
}


def as_tensors(a: Any, b: Any) -> tuple[Tensor, Tensor]:
    """Both as tensors, on the device of whichever is one."""
    device = next((value.device for value in (a, b) if isinstance(value, Tensor)), None)
    return torch.as_tensor(a, device=device), torch.as_tensor(b, device=device)


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
            return torch.zeros_like(inside, dtype=expression.table.dtype)
        found = expression.table[tuple(torch.broadcast_tensors(*limits))]
        return torch.where(inside, found, torch.zeros((), dtype=found.dtype, device=found.device))
    assert isinstance(expression, Operation)
    return _TORCH[expression.name](*(evaluate(arg, values) for arg in expression.args))


_TRITON = {
    "add": "({} + {})",
    "sub": "({} - {})",
    "mul": "({} * {})",
    "div": "({} / {})",
    "floordiv": "({} // {})",
    "mod": "({} % {})",
    "lt": "({} < {})",
    "le": "({} <= {})",
    "eq": "({} == {})",
    "and": "({} & {})",
    "or": "({} | {})",
    "not": "({} == 0)",
    "min": "tl.minimum({}, {})",
    "max": "tl.maximum({}, {})",
    "where": "tl.where({}, {}, {})",
    "tanh": "(2 * tl.sigmoid(2 * {}) - 1)",
    "exp": "tl.exp({})",
    "abs": "tl.abs({})",
}


def table_arguments(found: list[Tensor]) -> tuple[Any, ...]:
    """The kernel argument `tables`: for each tensor its pointer, its sizes and its strides."""
    return tuple(value for table in found for value in (table, *table.shape, *table.stride()))


def triton_source(expression: Expression, found: list[Tensor]) -> str:
    """The expression as Triton text over the variables' names and `tables`, the arguments for the tensors of `found`.

    Triton divides towards zero; positions in a mask are not negative, so // and % agree with Python's.
    """
    if isinstance(expression, Variable):
        return expression.name
    if isinstance(expression, Constant):
        return repr(expression.value)
    if isinstance(expression, Gather):
        before = found[: next(index for index, table in enumerate(found) if table is expression.table)]
        place, dims = sum(1 + 2 * table.ndim for table in before), expression.table.ndim
        indices = [triton_source(index, found) for index in expression.indices]
        offset = " + ".join(f"{index} * tables[{place + 1 + dims + dim}]" for dim, index in enumerate(indices))
        inside = " & ".join(
            f"({index} >= 0) & ({index} < tables[{place + 1 + dim}])" for dim, index in enumerate(indices)
        )
        return f"tl.load(tables[{place}] + ({offset}), mask={inside}, other=0)"
    assert isinstance(expression, Operation)
    return _TRITON[expression.name].format(*(triton_source(arg, found) for arg in expression.args))


def derivative(expression: Expression, name: str) -> Expression:
    """The derivative with respect to a variable, as an expression."""
    if isinstance(expression, Variable):
        return Constant(1.0 if expression.name == name else 0.0)
    if not isinstance(expression, Operation) or name not in variables(expression):
        return Constant(0.0)
    rule = _DERIVATIVES.get(expression.name)
    if rule is None:
        raise TypeError(
            f"{expression.name} has no derivative; a score function may use + - * / tanh exp abs min max where"
        )
    return rule(expression.args, [derivative(arg, name) for arg in expression.args])


_DERIVATIVES: dict[str, Callable[[Any, Any], Expression]] = {
    "add": lambda x, d: d[0] + d[1],
    "sub": lambda x, d: d[0] - d[1],
    "mul": lambda x, d: d[0] * x[1] + x[0] * d[1],
    "div": lambda x, d: (d[0] * x[1] - x[0] * d[1]) / (x[1] * x[1]),
    "tanh": lambda x, d: d[0] * (1.0 - tanh(x[0]) * tanh(x[0])),
    "exp": lambda x, d: d[0] * exp(x[0]),
    "abs": lambda x, d: where(x[0] < 0, -d[0], d[0]),
    "min": lambda x, d: where(x[1] < x[0], d[1], d[0]),
    "max": lambda x, d: where(x[0] < x[1], d[1], d[0]),
    "where": lambda x, d: where(x[0], d[1], d[2]),
}
