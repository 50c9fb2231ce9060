"""What matrix products are timed against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashkernel.core.op import Case, Op
from flashkernel.ops.matmul.torch import matmul


def eager(op: Op, case: Case) -> Callable[..., Any]:
    """cuBLAS and torch's operators, as model code writes them."""
    return matmul


def compiled(op: Op, case: Case) -> Callable[..., Any]:
    return torch.compile(matmul, dynamic=False)
