"""What a row is reduced to. The Triton and CUDA C++ kernels take these numbers as compile-time constants.

The order matters: up to WEIGHTED a reduction adds, starting from 0; from MAX on it starts from -inf; from LOGSUMEXP on
it adds exponentials.
"""

from __future__ import annotations

import torch
from torch import Tensor

SUM, MEAN, WEIGHTED, MAX, LOGSUMEXP = range(5)
SOFTMAX = 5  # reduces a row to (max, 1 / sum of exponentials); spread back over the row, those make the softmax
SOFTMAX_BACKWARD = 6  # spreads sum(y * dy) back over the row


def new_outputs(x: Tensor, kind: int) -> tuple[Tensor, Tensor]:
    """Uninitialized (y, saved) of the rows of x [rows, width]: y in x's dtype, and in float32 what the backward pass of
    max and logsumexp needs; empty for the others."""
    rows = x.shape[0]
    y = torch.empty(rows, dtype=x.dtype, device=x.device)
    return y, torch.empty(rows if kind in (MAX, LOGSUMEXP) else 0, dtype=torch.float32, device=x.device)
