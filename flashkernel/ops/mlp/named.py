"""The MLP with a name for every tensor, as a declaration wants them; pairs are put together here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from flashkernel.blocks.fp8 import FP8
from flashkernel.blocks.weight import Weight
from flashkernel.ops.mlp import api
from flashkernel.ops.mlp import reference as plain

_WEIGHTS = ("gate_up", "up", "down")


def mlp(x: Tensor, gate_up: Tensor, down: Tensor, **given: Any) -> Any:
    """flashkernel.mlp of the pairs (gate_up, up) and (gate_up_bias, up_bias), where those are given."""
    return gathered(api.mlp, x, {"gate_up": gate_up, "down": down, **given})


def reference(x: Tensor, gate_up: Tensor, down: Tensor, **given: Any) -> Any:
    """The reference, called alike."""
    return gathered(plain.mlp, x, {"gate_up": gate_up, "down": down, **given})


def gathered(function: Callable[..., Any], x: Tensor, given: dict[str, Any]) -> Any:
    """A function of pairs, called with named tensors and options; weights with scales become a `Weight`."""
    weights = {name: given.pop(name) for name in _WEIGHTS if name in given}
    for name in weights:
        scales = given.pop(f"{name}_scales", None)
        if scales is not None:  # a check in float64 has widened both, which loses nothing
            weights[name] = Weight.pack(weights[name].to(FP8), scales.float(), format="fp8")
    up_bias = given.pop("up_bias", None)
    if "up" not in weights:
        return function(x, weights["gate_up"], weights["down"], **given)
    if up_bias is not None:
        given["gate_up_bias"] = (given["gate_up_bias"], up_bias)
    return function(x, (weights["gate_up"], weights["up"]), weights["down"], **given)
