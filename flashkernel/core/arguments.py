"""What public functions do to their arguments before dispatch: range checks, autocast, and numbers under torch.compile.

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
    """ValueError if a number is NaN or infinite. It compares, because torch.compile cannot trace math.isfinite."""
    if not -INFINITY < value < INFINITY:
        raise ValueError(f"{function}: {name} is {value}; it must be a finite number")


def check_non_negative(function: str, name: str, value: float) -> None:
    """ValueError if a number is negative, NaN or infinite."""
    if not 0 <= value < INFINITY:
        raise ValueError(f"{function}: {name} is {value}; it must be a finite number, at least 0")


def check_scores(function: str, scale: float | None, softcap: float = 0.0) -> None:
    """ValueError if attention's softmax scale is NaN or infinite (None stands for 1 / sqrt(head_dim)), or if its
    softcap is none."""
    check_softcap(function, softcap)
    if scale is not None and not -INFINITY < scale < INFINITY:
        raise ValueError(f"{function}: scale is {scale}; it must be a finite number, or None for 1 / sqrt(head_dim)")


def check_softcap(function: str, softcap: float) -> None:
    """ValueError if a softcap is negative, NaN or infinite; 0 stands for none."""
    if not 0 <= softcap < INFINITY:
        raise ValueError(f"{function}: softcap is {softcap}; it must be positive and finite, or 0 for none")


def static(value: Number) -> Number:
    """The number as a constant: under torch.compile a symbolic number becomes a guard of the graph.

    Generated source and host tables need a number's value, which a symbol does not have.
    """
    if not torch.compiler.is_compiling() or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return operator.index(value)
    return float.fromhex(value.hex())  # dynamo evaluates this, and guards on the value


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype of autocast on a tensor's device; None where autocast is off."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Context for a composite backend whose operands are cast already: torch's operators inside keep their dtypes."""
    return nullcontext() if autocast_dtype(x) is None else torch.autocast(x.device.type, enabled=False)


def promoted(x: Tensor, y: Optional) -> tuple[Tensor, Optional]:
    """Two tensors that must share a dtype: under autocast both in their promoted dtype, otherwise as they are.

    Under autocast one may come from a linear layer in bfloat16 and the other be kept in float32.
    """
    if y is None or x.dtype == y.dtype or autocast_dtype(x) is None:
        return x, y
    wide = torch.promote_types(x.dtype, y.dtype)
    return x.to(wide), y.to(wide)


def autocast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor cast as autocast casts for its lower-precision operators: floats, except float64, to `dtype`."""
    return x.to(dtype) if is_float(x) and x.dtype != torch.float64 else x


def is_float(x: Tensor) -> bool:
    """Whether a tensor is of a dtype that operators compute in: floating point of 16 bits or more. The 8-bit floats are
    codes, which mean something beside their scales."""
    return x.is_floating_point() and x.dtype.itemsize > 1


def needs_gradients(*tensors: Tensor | None) -> bool:
    """Whether autograd records a call with these tensors."""
    if torch.is_grad_enabled():
        for x in tensors:
            if x is not None and x.requires_grad:
                return True
    return False


def check_written(function: str, name: str, x: Tensor, read: Tensor | None = None) -> None:
    """ValueError if a tensor that is written to needs a gradient, has an element that several indices share, or is the
    one that is read meanwhile."""
    if x is read:
        raise ValueError(f"{function}: {name} is also what is read; give another tensor")
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{function}: {name} is written to, and needs a gradient; detach it, or use torch.no_grad()")
    for size, step in zip(x.shape, x.stride()):
        if step == 0 and size > 1:
            raise ValueError(
                f"{function}: {name} is written to, and is an expanded view of shape {tuple(x.shape)} and strides "
                f"{x.stride()}; give its .contiguous()"
            )


def unit_stride(x: Tensor) -> Tensor:
    """The tensor, copied unless the elements of its last dim lie side by side."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def near(x: Tensor) -> Tensor:
    """The tensor, copied if its elements lie 2^31 or more elements apart: for vectors, scales and other small tensors
    with strides of their own, whose offsets kernels compute in 32 bits."""
    reach = sum([(size - 1) * stride for size, stride in zip(x.shape, x.stride())])
    return x if reach < 1 << 31 else x.contiguous()


def shares_memory(x: Tensor, other: Tensor) -> bool:
    """Whether both lie in one storage, with ranges of bytes that meet."""
    if x.untyped_storage()._cdata != other.untyped_storage()._cdata:
        return False
    ranges = []
    for one in (x, other):
        reach = sum([(size - 1) * stride for size, stride in zip(one.shape, one.stride())])
        first = one.storage_offset() * one.element_size()
        ranges.append((first, first + (reach + 1) * one.element_size() if one.numel() else first))
    return max(ranges[0][0], ranges[1][0]) < min(ranges[0][1], ranges[1][1])


def as_rows(x: Tensor) -> Tensor:
    """[rows, columns] with unit stride along the row; a view where the layout allows one."""
    return unit_stride(x if x.ndim == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1]))
