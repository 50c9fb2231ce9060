"""Gluon, Triton's language of layouts and barriers, under one set of names for triton 3.6 to 3.9.

Kernels take their names from here: versions after 3.6 renamed the copies between global and shared memory. Functions
written for plain Triton, such as a mask's, can be called from a Gluon kernel as they are.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = [
    "TensorDescriptor",
    "fence_async_shared",
    "gl",
    "gluon",
    "load_tile",
    "mbarrier",
    "store_tile",
    "tma",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]

load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
