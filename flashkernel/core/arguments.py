"""What public functions do to their arguments before dispatch: range checks, autocast, and numbers under a tracer.

All of it runs on every call, so it is comparisons and lookups only.
"""

from __future__ import annotations

import operator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

INFINITY = float("inf")
Number = TypeVar("Number", int, float)
Optional = TypeVar("Optional", Tensor, "Tensor | None")


def check_finite(function: str, name: str, value: float) -> None:
    """ValueError where a number is NaN or infinite. Comparisons, because torch.compile cannot trace math.isfinite."""
    if not -INFINITY < value < INFINITY:
        raise ValueError(f"{function}: {name} is {value}; it must be a finite number")


def check_non_negative(function: str, name: str, value: float) -> None:
    """ValueError where a number is negative, NaN or infinite."""
    if not 0 <= value < INFINITY:
        raise ValueError(f"{function}: {name} is {value}; it must be a finite number, at least 0")


def check_scale(function: str, scale: float | None) -> None:
    """The scale of an attention: None is 1 / sqrt(head_dim)."""
    if scale is not None and not -INFINITY < scale < INFINITY:
        raise ValueError(f"{function}: scale is {scale}; it must be a finite number, or None for 1 / sqrt(head_dim)")


def check_softcap(function: str, softcap: float) -> None:
    if not 0 <= softcap < INFINITY:
        raise ValueError(f"{function}: softcap is {softcap}; it must be positive and finite, or 0 for none")


def static(value: Number) -> Number:
    """A number as a constant. torch.compile may hold it as a symbol, which no text or table can be made of; this makes
    its value a guard of the graph."""
    if not torch.compiler.is_compiling() or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return operator.index(value)
    return float.fromhex(value.hex())  # the way to a float that dynamo evaluates


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast asks for on a tensor's device; None where it is off."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """For a composite backend whose operands are in the dtypes they should have: torch's operators inside keep them."""
    return nullcontext() if autocast_dtype(x) is None else torch.autocast(x.device.type, enabled=False)


def promoted(x: Tensor, y: Optional) -> tuple[Tensor, Optional]:
    """Two tensors that an operator wants in one dtype: under autocast the wider one of both, as torch promotes them
    (one may come from a linear layer, in bfloat16, the other from what is kept in float32); otherwise as they are."""
    if y is None or x.dtype == y.dtype or autocast_dtype(x) is None:
        return x, y
    wide = torch.promote_types(x.dtype, y.dtype)
    return x.to(wide), y.to(wide)


def autocast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor as autocast's lower-precision operators take it: floating point in `dtype`, but for float64."""
    return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x
