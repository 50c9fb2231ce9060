"""The reductions in Triton; each module holds its kernels first, then their launchers."""

from flashkernel.ops.reduce.triton.reduction import reduce, reduce_backward
from flashkernel.ops.reduce.triton.softmax_kernels import softmax, softmax_backward
from flashkernel.ops.reduce.triton.weighted import weighted_backward

__all__ = ["reduce", "reduce_backward", "softmax", "softmax_backward", "weighted_backward"]
