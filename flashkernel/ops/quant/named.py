"""quantize with its codes as integers, as a declaration wants them: e4m3 codes are compared bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashkernel.ops.quant import api
from flashkernel.ops.quant import reference as plain


def quantize(**given: Any) -> tuple[Any, ...]:
    """flashkernel.quantize."""
    return as_integers(api.quantize, given)


def reference(**given: Any) -> tuple[Any, ...]:
    """The reference, called alike; a scale () stands for the whole tensor."""
    if "scale" in given and given["scale"].ndim == 0:
        given["granularity"] = "tensor"
    return as_integers(plain.quantize, given)


def as_integers(function: Callable[..., Any], given: dict[str, Any]) -> tuple[Any, ...]:
    """A function that quantizes, with 8-bit floats seen as bytes; a given scale is not an output."""
    data, *rest = function(**given)
    codes = data if data.dtype == torch.int8 else data.view(torch.uint8)
    return (codes,) if "scale" in given else (codes, *rest)
