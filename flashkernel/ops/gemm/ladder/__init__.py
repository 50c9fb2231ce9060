"""The ladder: seven matrix products in CUDA C++, from the definition to Hopper's tensor cores, one idea each."""

from flashkernel.ops.gemm.ladder.rungs import RUNGS, Rung, matmul, unsupported

__all__ = ["RUNGS", "Rung", "matmul", "unsupported"]
