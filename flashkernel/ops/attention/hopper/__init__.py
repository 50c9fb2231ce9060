"""Attention on Hopper: Gluon kernels for sm_90 and their launchers."""

from flashkernel.ops.attention.hopper.backward_launch import backward
from flashkernel.ops.attention.hopper.forward_launch import forward

__all__ = ["backward", "forward"]
