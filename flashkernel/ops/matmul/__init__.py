"""Matrix products: dense, batched, scaled and grouped."""

from flashkernel.ops.matmul.api import matmul, matmul_dact
from flashkernel.ops.matmul.grouped import grouped_matmul

__all__ = ["grouped_matmul", "matmul", "matmul_dact"]
