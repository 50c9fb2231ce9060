"""Functions of indices, written once with Python's operators, that run in torch, in Triton and on intervals.

A mask such as `lambda b, h, q, k: (k <= q) & (q - k < 128)` is called once with variables; the operators build a
tree. The tree is evaluated by torch on index tensors (the ground truth), printed as Triton source for the kernels, and
evaluated on intervals of indices to learn of a whole tile whether nothing or everything in it is visible.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from flashkernel.blocks import torch_functions  # noqa: F401  registers them
from flashkernel.blocks.derivative import derivative
from flashkernel.blocks.nodes import (
    BOOLEAN,
    FLOATS,
    Constant,
    Expression,
    Gather,
    Operation,
    Table,
    Variable,
    absolute,
    children,
    exp,
    lift,
    maximum,
    minimum,
    read_dtype,
    tanh,
    variables,
    where,
)
from flashkernel.blocks.source import score_source, table_arguments, triton_source
from flashkernel.core.tracing import assume_constant_result

__all__ = [
    "BOOLEAN",
    "Constant",
    "Expression",
    "Gather",
    "Operation",
    "Table",
    "Traced",
    "Variable",
    "absolute",
    "as_tensor",
    "as_tensors",
    "bind",
    "children",
    "derivative",
    "evaluate",
    "exp",
    "integers_as_float32",
    "lift",
    "maximum",
    "minimum",
    "read_dtype",
    "recall",
    "score_function",
    "score_source",
    "table_arguments",
    "tables",
    "tanh",
    "trace",
    "trace_score",
    "triton_source",
    "variables",
    "where",
]


def bind(expression: Expression, found: list[Tensor], given: list[Tensor]) -> Expression:
    """The same expression over other tensors: each of `found` is replaced by its counterpart in `given`."""
    if isinstance(expression, Gather):
        position = next(index for index, table in enumerate(found) if table is expression.table)
        return Gather(given[position], tuple(bind(index, found, given) for index in expression.indices))
    if isinstance(expression, Operation):
        return Operation(expression.name, tuple(bind(arg, found, given) for arg in expression.args))
    return expression


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
        object.__setattr__(self, "cache_key", None if found else text)  # distinguishes calls (core/replay.py)
        if torch.compiler.is_compiling() or text not in _traced:
            _register(text, _encode(self.expression, found))

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and unpickled ones are made anew: another process does not know their texts."""
        return type(self), tuple([getattr(self, one.name) for one in fields(self)])

    tables: ClassVar[tuple[Tensor, ...]]
    text: ClassVar[str]
    cache_key: ClassVar[str | None]


def score_function(function: Callable[..., Any]) -> Traced:
    """A score function for `attention`, traced here and now; torch.compile needs it made outside the compiled function.

    Args:
        function: of the score and the indices of batch, head, query and key, written with Python's operators; it
            returns the new score. Tensors are read by `tensor[index]`; `custom` names the functions of torch.

    Returns:
        What `attention(..., score=...)` takes.

    Example:
        >>> import flashkernel as fk
        >>> nearer = fk.score_function(lambda score, b, h, q, k: score - 0.1 * abs(q - k))
        >>> q = k = v = torch.randn(1, 8, 2, 16)
        >>> fk.attention(q, k, v, score=nearer).shape
        torch.Size([1, 8, 2, 16])
    """
    return Traced(trace_score(function), "score")


_traced: dict[str, tuple[Any, ...]] = {}  # text -> encoded expression


@assume_constant_result
def _register(text: str, encoded: tuple[Any, ...]) -> bool:
    """Lets `recall` find an expression. A compiler that traces the call runs it then, not with the graph: the graph's
    operators recall what was traced inside it."""
    _traced.setdefault(text, encoded)
    return True


def _encode(node: Expression, found: list[Tensor]) -> tuple[Any, ...]:
    """An expression as nested tuples of plain values; a table is its position in `found`."""
    if isinstance(node, Variable):
        return "variable", node.name
    if isinstance(node, Constant):
        return "constant", node.value
    if isinstance(node, Gather):
        position = next(index for index, table in enumerate(found) if table is node.table)
        return "gather", position, tuple([_encode(index, found) for index in node.indices])
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


def tables(expression: Expression) -> list[Tensor]:
    """The tensors an expression reads, each once, in depth-first order."""
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
    "tanh": lambda a: torch.tanh(as_tensor(a)),
    "exp": lambda a: torch.exp(as_tensor(a)),
    "abs": lambda a: abs(a),
}


def as_tensor(a: Any, device: torch.device | str = "cpu") -> Tensor:
    """A number as a tensor, on the CPU and a float in float32, whatever torch's defaults are; a tensor as it is."""
    if isinstance(a, Tensor):
        return a
    return torch.as_tensor(a, dtype=torch.float32 if isinstance(a, float) else None, device=device)


def as_tensors(a: Any, b: Any) -> tuple[Tensor, Tensor]:
    """Both as tensors, on the device of whichever is one."""
    device = next((value.device for value in (a, b) if isinstance(value, Tensor)), "cpu")
    return as_tensor(a, device), as_tensor(b, device)


def integers_as_float32(*values: Any) -> list[Any]:
    """The values with integer tensors in float32, in which kernels compute: beside Python's floats, torch would take
    its default dtype, and bfloat16 holds no positions beyond 256."""
    return [
        x.to(torch.float32) if isinstance(x, Tensor) and x.dtype != torch.bool and not x.is_floating_point() else x
        for x in values
    ]


def evaluate(expression: Expression, values: Mapping[str, Any]) -> Any:
    """The value in torch: a tensor that broadcasts over those given for the variables, or a plain number."""
    if isinstance(expression, Variable):
        return values[expression.name]
    if isinstance(expression, Constant):
        return expression.value
    if isinstance(expression, Gather):
        device = expression.table.device
        indices = [torch.as_tensor(evaluate(index, values), device=device) for index in expression.indices]
        inside = torch.ones((), dtype=torch.bool, device=device)
        for index, size in zip(indices, expression.table.shape):
            inside = inside & (index >= 0) & (index < size)
        limits = [index.clamp(0, max(0, size - 1)) for index, size in zip(indices, expression.table.shape)]
        if expression.table.numel() == 0:
            return torch.zeros_like(inside, dtype=read_dtype(expression.table))
        found = expression.table[tuple(torch.broadcast_tensors(*limits))].to(read_dtype(expression.table))
        return torch.where(inside, found, torch.zeros((), dtype=found.dtype, device=found.device))
    assert isinstance(expression, Operation)
    args = [evaluate(arg, values) for arg in expression.args]
    if expression.name in FLOATS or any(isinstance(arg, float) for arg in args):
        args = integers_as_float32(*args)
    return _TORCH[expression.name](*args)
