"""What public functions do to their arguments before dispatch: range checks, autocast, and numbers under torch.compile.

All of it runs on every call, so it is comparisons and lookups only.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

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
    """Whether autograd records a call with these tensors, or carries their forward-mode derivatives along."""
    if torch.is_grad_enabled():
        for x in tensors:
            if x is not None and x.requires_grad:
                return True
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return False
    return any(x is not None and has_tangent(x) for x in tensors)


def has_tangent(x: Tensor) -> bool:
    """Whether a tensor has a forward-mode derivative, or a tensor that it wraps inside functorch's transforms."""
    while True:
        if forward_ad.unpack_dual(x).tangent is not None:
            return True
        if not torch._C._functorch.is_functorch_wrapped_tensor(x):
            return False
        x = torch._C._functorch.get_unwrapped(x)


def check_written(
    function: str, name: str, x: Tensor, *read: Tensor | None, in_place: Sequence[Tensor | None] = ()
) -> None:
    """ValueError if a tensor that is written to needs a gradient, has an element that several indices share, or lies in
    memory that is read meanwhile.

    Args:
        function: The public function, for the message.
        name: The tensor's name there.
        x: The tensor.
        read: Tensors that may have none of its memory.
        in_place: Tensors that are read element by element: they may be x, with the same elements, but no other part of
            its memory.
    """
    for one in read:
        if one is x:
            raise ValueError(f"{function}: {name} is also what is read; give another tensor")
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{function}: {name} is written to, and needs a gradient; detach it, or use torch.no_grad()")
    compiling = torch.compiler.is_compiling()  # strides may be symbols, and a traced function writes to no operand
    reach = 0  # of the dims with smaller strides
    for step, size in zip(x.stride(), x.shape) if compiling else sorted(zip(x.stride(), x.shape)):
        if size > 1 and (step == 0 or (step <= reach and not compiling and x.numel() > 0)):
            raise ValueError(
                f"{function}: {name} is written to, and is an expanded view, or another whose elements share memory: "
                f"shape {tuple(x.shape)}, strides {x.stride()}; give its .contiguous()"
            )
        reach += (size - 1) * step
    if compiling:
        return
    for one in read:
        if one is not None and shares_memory(x, one):
            raise ValueError(
                f"{function}: {name} lies in the memory of a tensor {tuple(one.shape)} that is read while it is "
                "written; give memory of its own"
            )
    for one in in_place:
        if one is not None and one is not x and shares_memory(x, one) and not _same_elements(x, one):
            raise ValueError(
                f"{function}: {name} lies in the memory of a tensor {tuple(one.shape)} that is added to it, but not "
                "element for element; give that tensor itself, or memory of its own"
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
    """Whether two tensors share bytes. Columns of one buffer, or every second of them, are known not to; of views whose
    strides do not tell, it is taken to be so."""
    if x.untyped_storage()._cdata != other.untyped_storage()._cdata or not x.numel() or not other.numel():
        return False
    pair = [_bytes(one) for one in (x, other)]
    (start, dims), (other_start, other_dims) = pair
    if start + _reach(dims) <= other_start or other_start + _reach(other_dims) <= start:
        return False
    for pitch in {step for _, dims in pair for _, step in dims}:
        # The bytes of each, modulo the pitch: an interval, unless a row is longer than what is left of the pitch.
        (first, end), (other_first, other_end) = [_residues(*one, pitch) for one in pair]
        if end <= pitch and other_end <= pitch and (end <= other_first or other_end <= first):
            return False
    return True


def _bytes(x: Tensor) -> tuple[int, list[tuple[int, int]]]:
    """(the first byte, [(size, stride in bytes)] with the bytes of an element as a dim)."""
    width = x.element_size()
    dims = [(size, step * width) for size, step in zip(x.shape, x.stride()) if size > 1 and step != 0]
    return int(x.storage_offset()) * width, [*dims, (width, 1)]


def _reach(dims: list[tuple[int, int]]) -> int:
    return 1 + sum([(size - 1) * step for size, step in dims])


def _residues(start: int, dims: list[tuple[int, int]], pitch: int) -> tuple[int, int]:
    """(first, end) of the bytes modulo a pitch, along the dims whose strides it does not divide."""
    first = start % pitch
    return first, first + _reach([(size, step) for size, step in dims if step % pitch])


def _same_elements(x: Tensor, other: Tensor) -> bool:
    """Whether two tensors are views of the same elements, index by index, but for dims of size 1."""
    one, two = [(x.dtype, x.storage_offset(), [dim for dim in zip(x.shape, x.stride()) if dim[0] > 1])
                for x in (x, other)]  # fmt: skip
    return one == two


def as_rows(x: Tensor) -> Tensor:
    """[rows, columns] with unit stride along the row; a view where the layout allows one."""
    return unit_stride(x if x.ndim == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1]))
