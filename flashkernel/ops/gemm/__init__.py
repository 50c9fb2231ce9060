"""Linear layers, and the epilogues that matrix products end with."""

from flashkernel.blocks.epilogue import Activation, Gate
from flashkernel.ops.gemm.api import linear

__all__ = ["Activation", "Gate", "linear"]
