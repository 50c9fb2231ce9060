"""The linear layer with a name for every tensor, as a declaration wants them; lists are put together here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from flashkernel.blocks.fp8 import FP8
from flashkernel.blocks.weight import Layout, Weight
from flashkernel.ops.gemm import api
from flashkernel.ops.gemm import reference as plain

_MORE = ("up", "second", "third")


def linear(x: Tensor, weight: Tensor, **given: Any) -> Any:
    """flashkernel.linear of [weight, up] or [weight, second, third], where those are given."""
    return gathered(api.linear, x, weight, given)


def reference(x: Tensor, weight: Tensor, **given: Any) -> Any:
    """The reference, called alike."""
    return gathered(plain.linear, x, weight, given)


def gathered(function: Callable[..., Any], x: Tensor, weight: Any, given: dict[str, Any]) -> Any:
    """A function of lists, called with named tensors and options."""
    activation_dtype = given.pop("activation_dtype", None)
    format = given.pop("format", None)
    if format is not None:  # the float matrix in another format; the values are the same in every dtype of the check
        layout = Layout.parse(format)
        shape = "x".join(map(str, layout.group_shape))
        weight = Weight.quantize(weight.float(), layout.format, shape, symmetric=not layout.zeros)
        if activation_dtype is not None:
            weight = replace(weight, activation_dtype=activation_dtype)
    scales = {name: given.pop(f"{name}_scales") for name in ("weight", *_MORE) if f"{name}_scales" in given}
    for name, values in scales.items():  # a check in float64 has widened both, which loses nothing
        data = weight if name == "weight" else given[name]
        packed = Weight.pack(data.to(FP8), values.float(), format="fp8")
        if activation_dtype is not None:
            packed = replace(packed, activation_dtype=activation_dtype)
        if name == "weight":
            weight = packed
        else:
            given[name] = packed
    more = [name for name in _MORE if name in given]
    rest = {name: value for name, value in given.items() if not name.startswith(_MORE)}
    if not more:
        return function(x, weight, **rest)
    if "bias" in rest:
        rest["bias"] = [rest["bias"], *[given[f"{name}_bias"] for name in more]]
    return function(x, [weight, *[given[name] for name in more]], **rest)
