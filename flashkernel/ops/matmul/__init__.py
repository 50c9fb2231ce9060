"""Matrix products: dense, batched, scaled and grouped."""

from flashkernel.ops.matmul.api import matmul, matmul_dact
from flashkernel.ops.matmul.grouped import grouped_matmul, grouped_weight_gradient

__all__ = ["grouped_matmul", "grouped_weight_gradient", "matmul", "matmul_dact"]
