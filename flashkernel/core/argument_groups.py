"""Named groups of arguments, and the flat arguments that a torch operator's schema is made of.

A schema has tensors, numbers, strings, dtypes and lists of them, but no structures. The functions of an operator take
groups (a NamedTuple or a frozen dataclass), and `ArgumentGroups` derives the flat arguments from the annotations of one
of them: a group stands for its fields, in order, which may be groups themselves. A field of type `int | Tensor` stands
for two arguments, the number and `<name>_tensor`. Both directions are generated source, so that a call does no more
than it would if the arguments were written out.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import typing
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

_ABSENT = Tensor | None


class ArgumentGroups:
    """The flat arguments of a function whose parameters may be groups.

    Args:
        function: Its annotations say which parameters are groups.

    Attributes:
        names: Names of the flat arguments: those of the fields, behind the name of their group where they are not
            unique.
        grouped: Whether there is a group at all; otherwise flat and grouped arguments are the same.
        tensor_lists: Indices of the flat arguments that are lists of tensors.
        flatten: Given the function's arguments, returns the flat ones as a tuple.
        rebuild: Given the flat arguments, returns the function's as a tuple.

    Example:
        >>> from typing import NamedTuple
        >>> import torch
        >>> from torch import Tensor
        >>> class Pair(NamedTuple):
        ...     first: Tensor
        ...     seed: int | Tensor = 0
        >>> def function(x: Tensor, pair: Pair, scale: float) -> Tensor: ...
        >>> groups = ArgumentGroups(function)
        >>> groups.names
        ['x', 'first', 'seed', 'seed_tensor', 'scale']
        >>> x, scale = torch.ones(()), 2.0
        >>> groups.flatten(x, Pair(x, 7), scale)[2:]
        (7, None, 2.0)
        >>> groups.rebuild(x, x, 7, None, scale)[1].seed
        7
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        hints = typing.get_type_hints(function)
        returns = hints.pop("return", None)
        self._returns = None if returns is type(None) else returns
        self._parameters = {name: hints[name] for name in inspect.signature(function).parameters}
        leaves = [leaf for name, kind in self._parameters.items() for leaf in _leaves((name,), kind)]
        used = Counter(path[-1] for path, _ in leaves)
        self._names = {path: path[-1] if used[path[-1]] == 1 else "_".join(path[-2:]) for path, _ in leaves}
        self._types: list[Any] = []
        self._kinds: dict[str, Any] = {}
        for path, kind in leaves:
            name = self._names[path]
            if _is_number_or_tensor(kind):
                self._kinds |= {name: int, f"{name}_tensor": _ABSENT}
            else:
                self._kinds[name] = kind
        self.names = list(self._kinds)
        self.grouped = self.names != list(self._parameters)
        self.tensor_lists = [index for index, kind in enumerate(self._kinds.values()) if kind == list[Tensor]]
        flat = ", ".join(itertools.chain.from_iterable(_read(path, kind) for path, kind in leaves))
        fields = [line for name, kind in self._parameters.items() for line in _field_reads((name,), kind)]
        self._groups = ", ".join([self._made((name,), kind) for name, kind in self._parameters.items()])
        self.flatten = self._generate("flatten", ", ".join(self._parameters), *fields, f"return ({flat},)")
        self.rebuild = self._generate("rebuild", ", ".join(self.names), f"return ({self._groups},)")

    def flat(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of the groups as one of the flat arguments, annotated for a schema."""
        if not self.grouped:
            return function
        call = f"return function({self._groups})"
        made = self._generate(function.__name__, ", ".join(self.names), call, function=function)
        made.__module__, made.__doc__ = function.__module__, function.__doc__
        made.__annotations__ = {**self._kinds, "return": self._returns}
        return made

    def _made(self, path: tuple[str, ...], kind: Any) -> str:
        """The expression that makes a parameter, or a field, of flat arguments."""
        fields = _fields(kind)
        if fields is not None:
            self._types.append(kind)
            made = f"type{len(self._types) - 1}"
            parts = ", ".join([self._made((*path, name), field) for name, field in fields.items()])
            return f"new({made}, ({parts},))" if issubclass(kind, tuple) else f"{made}({parts})"
        name = self._names[path]
        return f"{name} if {name}_tensor is None else {name}_tensor" if _is_number_or_tensor(kind) else name

    def _generate(self, name: str, parameters: str, *lines: str, **others: Any) -> Any:
        types = {f"type{index}": kind for index, kind in enumerate(self._types)}
        names = {"Tensor": Tensor, "new": tuple.__new__, **types, **others}
        body = "\n    ".join(lines)
        exec(compile(f"def {name}({parameters}):\n    {body}\n", f"<flashkernel {name}>", "exec"), names)
        return names[name]


def _fields(kind: Any) -> dict[str, Any] | None:
    """The fields of a group with their types; None for an argument."""
    if not isinstance(kind, type):
        return None
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    return typing.get_type_hints(kind) if issubclass(kind, tuple) and hasattr(kind, "_fields") else None


def _leaves(path: tuple[str, ...], kind: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    fields = _fields(kind)
    if fields is None:
        yield path, kind
        return
    for name, field in fields.items():
        yield from _leaves((*path, name), field)


def _is_number_or_tensor(kind: Any) -> bool:
    return set(typing.get_args(kind)) == {int, Tensor}


def _variable(path: tuple[str, ...]) -> str:
    """The name of a parameter, or of a field in generated source."""
    return "__".join(path)


def _field_reads(path: tuple[str, ...], kind: Any) -> Iterator[str]:
    """Source that gives each field of a group a variable."""
    fields = _fields(kind)
    if fields is None:
        return
    variables, group = [_variable((*path, name)) for name in fields], _variable(path)
    if issubclass(kind, tuple):
        yield f"{', '.join(variables)}, = {group}"
    else:
        yield from [f"{variable} = {group}.{name}" for variable, name in zip(variables, fields)]
    for name, field in fields.items():
        yield from _field_reads((*path, name), field)


def _read(path: tuple[str, ...], kind: Any) -> tuple[str, ...]:
    """The expressions of the flat arguments that stand for a field."""
    value = _variable(path)
    if _is_number_or_tensor(kind):
        return f"0 if isinstance({value}, Tensor) else {value}", f"{value} if isinstance({value}, Tensor) else None"
    return (value,)
