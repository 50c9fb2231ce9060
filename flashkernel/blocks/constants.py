"""Mathematical constants of host code; blocks/softmax_triton.py has them as constants of kernels."""

import math

LOG2E = math.log2(math.e)  # exp(x) = exp2(x * LOG2E)
LN2 = math.log(2)
