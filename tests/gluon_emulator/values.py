"""Values of a kernel: tensors that assignment operators do not change."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor

UNSIGNED = "uint32"  # torch cannot multiply such tensors: they are int64, cut off


class Value(Tensor):
    """A value of the kernel's: assignment operators make a new one, as they do there."""

    __iadd__ = Tensor.__add__
    __isub__ = Tensor.__sub__
    __imul__ = Tensor.__mul__
    __iand__ = Tensor.__and__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As for any subclass of Tensor, without the search for functions whose results are not wrapped."""
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if isinstance(result, (tuple, list)):
            return type(result)(as_value(one) if isinstance(one, Tensor) else one for one in result)
        return result.as_subclass(cls) if isinstance(result, Tensor) else result

    @property
    def type(self) -> Any:  # type: ignore[override]
        return types.SimpleNamespace(layout=None)

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Value:  # type: ignore[override]
        if dtype == UNSIGNED:
            return super().to(torch.int64) & 0xFFFFFFFF
        return self.contiguous().view(dtype) if bitcast else super().to(dtype)


def as_value(tensor: Tensor) -> Value:
    return tensor.as_subclass(Value)


def poison(dtype: torch.dtype) -> float:
    """What memory holds that was not written: NaN; of integers, a value that tests do not expect."""
    return float("nan") if dtype.is_floating_point else 113


def as_tensors(*values: Any) -> list[Tensor]:
    return [torch.as_tensor(value) for value in values]


def where(condition: Any, a: Any, b: Any) -> Tensor:
    kind = torch.result_type(*as_tensors(a, b))
    return torch.where(*as_tensors(condition), *(value.to(kind) for value in as_tensors(a, b)))
