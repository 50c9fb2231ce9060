"""Matrix products: dense, batched, scaled and grouped."""

from flashkernel.ops.matmul.api import grouped_matmul, matmul, matmul_dact

__all__ = ["grouped_matmul", "matmul", "matmul_dact"]
