"""Linear layers, and the epilogues that matrix products end with."""

from flashkernel.blocks.epilogue import Activation, Gate
from flashkernel.blocks.weight import Weight
from flashkernel.ops.gemm import ladder
from flashkernel.ops.gemm.api import linear, quantized_linear

__all__ = ["Activation", "Gate", "Weight", "ladder", "linear", "quantized_linear"]
