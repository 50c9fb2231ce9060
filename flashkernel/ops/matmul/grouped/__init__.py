"""Grouped products: a product for each group of rows, for mixtures of experts."""

from flashkernel.ops.matmul.grouped.api import grouped_matmul, grouped_weight_gradient

__all__ = ["grouped_matmul", "grouped_weight_gradient"]
