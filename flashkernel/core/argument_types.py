"""Types of the arguments of public functions, checked against the annotations of their parameters.

A number where a tensor is expected, a NumPy array, a string: all are refused in one place, with what was given, what is
expected and what to do. NumPy's numbers become Python's, which kernels take. Sizes, dtypes and ranges are checked by
the functions themselves; so are `OWN_CHECKS`, whose messages say more.
"""

from __future__ import annotations

import inspect
import numbers
import operator
import typing
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cache, wraps
from types import UnionType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

OWN_CHECKS = ("causal", "window", "activation")  # blocks say more of them, as of masks
_Function = TypeVar("_Function", bound=Callable[..., Any])
_PARAMETER = torch.nn.Parameter
_LISTS = (Sequence, torch.nn.ParameterList)
_WORDS = {Tensor: "a tensor", float: "a number", int: "a whole number", bool: "True or False", str: "a string",
          torch.dtype: "a dtype such as torch.float16", type(None): "None"}  # fmt: skip


class Expected(NamedTuple):
    """What a parameter takes: the types that pass without a further look, all types, and those of a list's items."""

    exact: frozenset[type]
    types: tuple[type, ...]
    items: Expected | None

    def words(self) -> str:
        """As in a message."""
        names = [_WORDS.get(one) or _with_article(one.__name__) for one in self.types if one is not type(None)]
        if self.items is not None:
            names.append(f"a list of them, each {self.items.words()}")
        if type(None) in self.types:
            names.append("None")
        return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"

    def take(self, function: str, name: str, value: Any) -> Any:
        """The value, NumPy's numbers as Python's; TypeError for one of another type."""
        for kind in self.types:
            if kind is Tensor:
                if isinstance(value, Tensor):
                    return value
            elif kind is bool:
                if isinstance(value, bool) or _is_numpy_bool(value):
                    return bool(value)
            elif kind is int:
                if isinstance(value, (numbers.Integral, torch.SymInt)) and not isinstance(value, bool):
                    return value if isinstance(value, torch.SymInt) else operator.index(value)
            elif kind is float:
                if isinstance(value, (numbers.Real, torch.SymInt, torch.SymFloat)) and not isinstance(value, bool):
                    return value if isinstance(value, (int, torch.SymInt, torch.SymFloat)) else float(value)
            elif isinstance(value, kind):
                return value
        if self.items is not None and isinstance(value, _LISTS) and not isinstance(value, str):
            return [_taken(self.items, function, f"{name}[{index}]", one) for index, one in enumerate(value)]
        raise TypeError(f"{function}: {name} is {described(value)}; it must be {self.words()}{self._advice(value)}")

    def _advice(self, value: Any) -> str:
        if Tensor in self.types and (hasattr(value, "__array__") or isinstance(value, (list, tuple))):
            return "; torch.as_tensor makes a tensor of it"
        if isinstance(value, Tensor) and value.numel() == 1 and (float in self.types or int in self.types):
            return "; its .item() is a number, without a gradient"
        if isinstance(value, str) and torch.dtype in self.types:
            return f"; torch.{value}, perhaps" if isinstance(getattr(torch, value, None), torch.dtype) else ""
        return ""


def described(value: Any) -> str:
    """A value as in a message: short, and with its type."""
    if value is None or isinstance(value, (bool, int, float, complex, str, torch.dtype)):
        text = repr(value)
        return text if len(text) <= 80 else f"{text[:76]}..."
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    shape = getattr(value, "shape", None)
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return f"a {kind}" + (f" of shape {shape}" if isinstance(shape, tuple) else "")


def type_checked(function: _Function) -> _Function:
    """Give a public function a check of its arguments' types. torch.compile traces the function itself."""
    name = function.__name__
    expected: dict[str, Expected] = {}
    positional: list[Expected | None] = []

    def prepare() -> None:  # at the first call: annotations are evaluated then
        hints = typing.get_type_hints(function)
        for one in inspect.signature(function).parameters.values():
            found = None if one.name in OWN_CHECKS else expectation(hints.get(one.name))
            if found is not None and one.kind is not one.VAR_KEYWORD:
                expected[one.name] = found
            if one.kind is one.POSITIONAL_OR_KEYWORD:
                positional.append(found)
        names.extend(inspect.signature(function).parameters)

    names: list[str] = []

    @wraps(function)
    def entry(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        if not names:
            prepare()
        for index, (value, one) in enumerate(zip(args, positional)):
            if one is not None and (type(value) not in one.exact or _unusual(value)):
                taken = _taken(one, name, names[index], value)
                if taken is not value:
                    args = (*args[:index], taken, *args[index + 1 :])
        for label, value in kwargs.items():
            known = expected.get(label)
            if known is not None and (type(value) not in known.exact or _unusual(value)):
                kwargs[label] = _taken(known, name, label, value)
        return function(*args, **kwargs)

    return entry  # type: ignore[return-value]


def _unusual(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.layout is not torch.strided or value.is_nested or value.is_neg())


def _taken(expected: Expected, function: str, name: str, value: Any) -> Any:
    value = expected.take(function, name, value)
    if _unusual(value):
        if value.layout is torch.strided and value.is_neg():
            raise TypeError(
                f"{function}: {name} is a view with its sign reversed (as .conj().imag is), whose memory has other "
                "values; it must be a plain tensor: its .resolve_neg() is"
            )
        kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
        advice = "pad it" if value.is_nested else "its .to_dense() is"
        raise TypeError(f"{function}: {name} is a tensor in layout {kind}; it must be a dense one: {advice}")
    return value


def expectation(annotation: Any) -> Expected | None:
    """What a parameter with this annotation takes; None where it is not checked here."""
    return None if annotation is None or annotation is Any else _expectation(annotation)


@cache
def _expectation(annotation: Any) -> Expected | None:
    union = isinstance(annotation, UnionType) or typing.get_origin(annotation) is typing.Union
    kinds: list[type] = []
    items = None
    for one in typing.get_args(annotation) if union else (annotation,):
        if typing.get_origin(one) in (Sequence, list):
            items = _expectation(typing.get_args(one)[0])
            if items is None:
                return None
        elif isinstance(one, type) and one.__module__.startswith("flashkernel.blocks.mask"):
            return None
        elif isinstance(one, type) and (one in _WORDS or one.__module__.startswith("flashkernel.")):
            kinds.append(one)
        else:
            return None
    exact = set(kinds)
    if Tensor in exact:
        exact.add(_PARAMETER)
    if float in exact:
        exact.add(int)
    return Expected(frozenset(exact), tuple(kinds), items)


def check_fields(instance: Any) -> None:
    """As `type_checked`, for the fields of a frozen dataclass that its caller gives: call it in __post_init__."""
    if torch.compiler.is_compiling():
        return
    kind: Any = type(instance)
    hints = _hints(kind)
    for one in fields(instance):
        known = expectation(hints[one.name]) if one.init else None
        value = getattr(instance, one.name) if known is not None else None
        if known is not None and type(value) not in known.exact:
            object.__setattr__(instance, one.name, _taken(known, kind.__name__, one.name, value))


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def plain_number(value: Any) -> Any:
    """NumPy's and other libraries' numbers as Python's; anything else as it is."""
    if type(value) in (bool, int, float) or isinstance(value, (Tensor, torch.SymInt, torch.SymFloat)):
        return value
    if _is_numpy_bool(value):
        return bool(value)
    if isinstance(value, numbers.Integral):
        return operator.index(value)
    return float(value) if isinstance(value, numbers.Real) else value


def _with_article(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def _is_numpy_bool(value: Any) -> bool:
    return type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")  # NumPy 2's name, and 1's
