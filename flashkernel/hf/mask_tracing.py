"""Transformers' mask functions as expressions: a function is called once, with indices that record what is done to them
(symbolic tracing)."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flashkernel.blocks import expression as ex
from flashkernel.blocks.expression import Constant, Expression, Table, Variable
from flashkernel.blocks.torch_functions import condition_of


class Untraceable(Exception):
    """A mask function that cannot be traced into a Mask."""


def traced_indices(
    batch: int, lengths: tuple[int, int], offsets: tuple[int | Tensor, int | Tensor], device: torch.device | str
) -> tuple[TracedIndex, TracedIndex, TracedIndex, TracedIndex]:
    """(batch, head, query, key) as Transformers counts them: from the first token of the sequence.

    Offsets are tables, so that the next decoding step needs no new kernel, only other numbers.
    """
    b, h, q, k, sq, sk = (Variable(name) for name in ("b", "h", "q", "k", "sq", "sk"))

    def shifted(index: Expression, offset: int | Tensor) -> Expression:
        if isinstance(offset, int) and offset == 0:
            return index
        if isinstance(offset, Tensor):
            return (
                index + Table(offset.to(device, torch.int32).reshape(1).repeat(batch))[b]
            )  # a copy: the cache changes its own
        return index + Table(torch.full((batch,), offset, dtype=torch.int32, device=device))[b]

    numbers = not any(isinstance(offset, Tensor) for offset in offsets)
    if numbers and offsets[0] + lengths[0] == offsets[1] + lengths[1]:  # the last query stands on the last key
        query = shifted(q + (sk - sq), offsets[1])
    else:
        query = shifted(q, offsets[0])
    return tuple(TracedIndex(index, batch) for index in (b, h, query, shifted(k, offsets[1])))  # type: ignore[return-value]


def trace(mask_function: Callable[..., Any], indices: tuple[TracedIndex, ...]) -> Expression:
    with _TraceIndexing():
        found = mask_function(*indices)
    if not isinstance(found, TracedIndex):
        raise Untraceable(f"it returned {type(found).__name__} whatever the indices")
    if found.expression.kind != ex.BOOLEAN:
        raise Untraceable("it returned numbers, not booleans")
    return found.expression


class _TraceIndexing(TorchFunctionMode):
    """Makes tensor[index] with a traced index read a Table."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            given = args[1] if isinstance(args[1], tuple) else (args[1],)
            first = next((index for index in given if isinstance(index, TracedIndex)), None)
            if first is not None:
                return first.read(args[0], given)
        return func(*args, **(kwargs or {}))


_OPERATIONS: dict[str, Callable[..., Expression]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
    "floor_divide": operator.floordiv,
    "mod": operator.mod,
    "remainder": operator.mod,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
    "and": lambda a, b: ex.lift(a) & b,
    "bitwise_and": lambda a, b: ex.lift(a) & b,
    "logical_and": lambda a, b: condition_of(a) & condition_of(b),
    "or": lambda a, b: ex.lift(a) | b,
    "bitwise_or": lambda a, b: ex.lift(a) | b,
    "logical_or": lambda a, b: condition_of(a) | condition_of(b),
    "invert": operator.invert,
    "bitwise_not": operator.invert,
    "logical_not": lambda a: ~condition_of(a),
    "neg": operator.neg,
    "abs": ex.absolute,
    "where": ex.where,
    "minimum": ex.minimum,
    "maximum": ex.maximum,
}


class TracedIndex:
    """A traced index, or an expression of it; to a mask function it looks like an integer tensor."""

    def __init__(self, expression: Expression, batch: int) -> None:
        self.expression = expression
        self.batch = batch
        self.device = None

    def apply(self, name: str, *args: Any) -> TracedIndex:
        if name not in _OPERATIONS:
            raise Untraceable(f"it uses {name}")
        try:
            return TracedIndex(_OPERATIONS[name](*(self.lift(arg) for arg in args)), self.batch)
        except TypeError as error:
            raise Untraceable(str(error)) from error

    def lift(self, value: Any) -> Any:
        if isinstance(value, TracedIndex):
            return value.expression
        if isinstance(value, Tensor):
            if value.numel() != 1 or value.is_floating_point():
                raise Untraceable(f"it computes with a tensor of shape {tuple(value.shape)} as a whole")
            return self.read(value.reshape(1).repeat(self.batch), (TracedIndex(Variable("b"), self.batch),)).expression
        return value

    def read(self, table: Tensor, indices: tuple[Any, ...]) -> TracedIndex:
        if len(indices) != table.ndim or not all(isinstance(index, (TracedIndex, int, Tensor)) for index in indices):
            raise Untraceable(f"it reads a tensor of {table.ndim} dims by {len(indices)} indices")
        found = Table(table.to(torch.int8) if table.dtype == torch.bool else table)[tuple(map(self.lift, indices))]
        return TracedIndex(found == 1 if table.dtype == torch.bool else found, self.batch)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> TracedIndex:
        if kwargs:
            raise Untraceable(f"it calls {func.__name__} with {', '.join(kwargs)}")
        first = next(arg for arg in args if isinstance(arg, TracedIndex))
        return first.apply(func.__name__.strip("_"), *args)

    def to(self, *_: Any, **__: Any) -> TracedIndex:
        return self

    def new_ones(self, shape: Any, dtype: torch.dtype | None = None) -> TracedIndex:
        return self._constant(shape, dtype, 1)

    def new_zeros(self, shape: Any, dtype: torch.dtype | None = None) -> TracedIndex:
        return self._constant(shape, dtype, 0)

    def _constant(self, shape: Any, dtype: torch.dtype | None, value: int) -> TracedIndex:
        if tuple(shape):
            raise Untraceable(f"it makes a tensor of shape {tuple(shape)}")
        return TracedIndex(Constant(bool(value) if dtype == torch.bool else value), self.batch)

    def __bool__(self) -> bool:
        raise Untraceable("it branches on an index")

    def __getattr__(self, name: str) -> Any:
        raise Untraceable(f"it uses .{name} of an index")

    __hash__ = object.__hash__


def _method(name: str, swap: bool = False) -> Callable[..., TracedIndex]:
    def call(self: TracedIndex, *others: Any) -> TracedIndex:
        return self.apply(name, *((*others, self) if swap else (self, *others)))

    return call


for _name in ("add", "sub", "mul", "floordiv", "mod", "and", "or"):
    setattr(TracedIndex, f"__{_name}__", _method(_name))
    setattr(TracedIndex, f"__r{_name}__", _method(_name, swap=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "invert", "neg", "abs"):
    setattr(TracedIndex, f"__{_name}__", _method(_name))
