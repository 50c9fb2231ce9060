"""What sampling is timed against: torch's sort, softmax and cumulative sum, eager and compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashkernel.core.op import Case, Op
from flashkernel.ops.sampling import torch as by_torch


def eager(op: Op, case: Case) -> Callable[..., Any]:
    return by_torch.sample


def compiled(op: Op, case: Case) -> Callable[..., Any]:
    return torch.compile(by_torch.sample, dynamic=False)
