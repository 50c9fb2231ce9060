"""What quantization is timed against: torch's own operators, eager and compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashkernel.core.op import Case, Op
from flashkernel.ops.quant import named
from flashkernel.ops.quant import torch as native


def eager(op: Op, case: Case) -> Callable[..., Any]:
    """An operator of torch for each step."""
    function = getattr(native, op.name)
    return (lambda **given: named.as_integers(function, given)) if op.name == "quantize" else function


def compiled(op: Op, case: Case) -> Callable[..., Any]:
    """The same under torch.compile, which fuses it."""
    return torch.compile(eager(op, case), dynamic=False)
