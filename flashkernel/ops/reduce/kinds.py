"""What a row is reduced to. The Triton and CUDA C++ kernels take these numbers as compile-time constants.

The order matters: up to WEIGHTED a reduction adds, starting from 0; from MAX on it starts from -inf; from LOGSUMEXP on
it adds exponentials.
"""

from __future__ import annotations

SUM, MEAN, WEIGHTED, MAX, LOGSUMEXP = range(5)
SOFTMAX = 5  # reduces a row to (max, 1 / sum of exponentials); spread back over the row, those make the softmax
SOFTMAX_BACKWARD = 6  # spreads sum(y * dy) back over the row
