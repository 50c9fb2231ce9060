"""Linear layers, and the epilogues that matrix products end with."""

from flashkernel.blocks.epilogue import Activation, Gate
from flashkernel.blocks.weight import Weight
from flashkernel.ops.gemm import ladder
from flashkernel.ops.gemm.api import linear, quantized_linear
from flashkernel.ops.gemm.dense import rounded_to_fp8
from flashkernel.ops.gemm.library import in_fp8
from flashkernel.ops.gemm.quantized import few_rows

__all__ = [
    "Activation",
    "Gate",
    "Weight",
    "few_rows",
    "in_fp8",
    "ladder",
    "linear",
    "quantized_linear",
    "rounded_to_fp8",
]
