"""What the activations are timed against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flashkernel.blocks.gate_up import split_gate_up
from flashkernel.core.op import Case, Op
from flashkernel.ops.activation.reference import gpt_oss_glu, squared_relu

_ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "gelu": F.gelu,
    "silu": F.silu,
    "relu": F.relu,
    "squared_relu": squared_relu,
    "swiglu": F.silu,
    "geglu": F.gelu,
    "reglu": F.relu,
}


def eager(op: Op, case: Case) -> Callable[..., Any]:
    """Torch's operators in the input's dtype, as model code writes them."""
    if op.name == "gpt_oss_glu":
        return gpt_oss_glu
    activate = _ACTIVATIONS[op.name]

    def elementwise(x: Tensor, **options: Any) -> Tensor:
        return activate(x, **options)

    def geglu(gate: Tensor, up: Tensor | None = None, *, approximate: str = "tanh", packed: str = "halves") -> Tensor:
        left, right = split_gate_up(gate, packed) if up is None else (gate, up)
        return F.gelu(left, approximate=approximate) * right

    def glu(gate: Tensor, up: Tensor | None = None, *, packed: str = "halves") -> Tensor:
        left, right = split_gate_up(gate, packed) if up is None else (gate, up)
        return activate(left) * right

    if "gate" not in op.inputs:
        return elementwise
    return geglu if op.name == "geglu" else glu


def compiled(op: Op, case: Case) -> Callable[..., Any]:
    return torch.compile(eager(op, case), dynamic=False)


def liger(op: Op, case: Case) -> Callable[..., Any]:
    from liger_kernel.transformers import functional as liger_functional

    if case.present != ("up",) or case.options:
        raise ValueError("Liger's gated activations take a separate gate and up, and GeLU in its tanh form")
    function = liger_functional.liger_swiglu if op.name == "swiglu" else liger_functional.liger_geglu

    def glu(gate: Tensor, up: Tensor) -> Tensor:
        # The backward overwrites the inputs it saved: repeated, it computes on other values, just as fast.
        return function(gate, up)

    return glu
