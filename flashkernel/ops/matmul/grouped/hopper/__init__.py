"""Grouped products on Hopper: Gluon kernels for sm_90 and their launchers."""

from flashkernel.ops.matmul.grouped.hopper.launch import grouped_forward, grouped_weight_gradient

__all__ = ["grouped_forward", "grouped_weight_gradient"]
