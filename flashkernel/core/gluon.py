"""Gluon, Triton's language of layouts and barriers, under one set of names for triton 3.6 to 3.9.

Kernels take their names from here: versions after 3.6 renamed the copies between global and shared memory. Functions
written for plain Triton, such as a mask's, can be called from a Gluon kernel as they are.

Tensor descriptors are made at every call, and to make one anew takes as long as a launch: `fields_of` works out what
those of one kind have in common, once, and `described` makes them from that.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
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
    "add_tile",
    "described",
    "fence_async_shared",
    "fields_of",
    "gl",
    "gluon",
    "load_tile",
    "mbarrier",
    "new_barriers",
    "store_tile",
    "synchronize",
    "tma",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]

load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
synchronize = getattr(gl, "thread_barrier", None) or gl.barrier


@builtin
def _add_tile(tensor_desc: Any, coord: Any, src: Any, _semantic: Any = None) -> None:
    """Add a tile in shared memory to one in memory. The compiler has this, but 3.6 has no name for it."""
    places = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, places, src.handle)


add_tile = getattr(tma, "async_atomic_add", None) or _add_tile


@gluon.jit
def new_barriers(NUMBER: gl.constexpr, COUNT: gl.constexpr):
    """So many barriers in shared memory, each of so many arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(NUMBER):
        mbarrier.init(made.index(place), count=COUNT)
    return made


class _Layout(gl.NVMMASharedLayout):
    """A layout that remembers its text, which Triton asks for at every launch."""

    text: str

    def __repr__(self) -> str:
        return self.text


def fields_of(like: Tensor, box: list[int], layout: gl.NVMMASharedLayout) -> dict[str, Any]:
    """What descriptors of tensors like this one have in common; it needs no memory of its own."""
    named = object.__new__(_Layout)
    named.__dict__.update(vars(layout), text=repr(layout))
    return vars(TensorDescriptor(like, list(like.shape), list(like.stride()), box, named))


def described(fields: dict[str, Any], base: Tensor, shape: Sequence[int], strides: list[int]) -> Any:
    """A descriptor with these fields, of a tensor."""
    made = object.__new__(TensorDescriptor)
    made.__dict__.update(fields, base=base, shape=shape, strides=strides)
    return made
