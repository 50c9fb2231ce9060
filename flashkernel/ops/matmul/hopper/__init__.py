"""Matrix products on Hopper: a Gluon kernel for sm_90 and its launcher."""

from flashkernel.ops.matmul.hopper.launch import dact, forward

__all__ = ["dact", "forward"]
