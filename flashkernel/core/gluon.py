"""Gluon, Triton's language of layouts and barriers, under one set of names for triton 3.6 to 3.9.

Kernels take their names from here: versions after 3.6 renamed the copies between global and shared memory and
`reinterpret`. Functions written for plain Triton, such as a mask's, can be called from a Gluon kernel as they are.

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
from triton.experimental.gluon.language.nvidia.ampere import async_copy
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
    "consumer_release",
    "described",
    "fence_async_shared",
    "fields_of",
    "gl",
    "gluon",
    "load_tile",
    "mbarrier",
    "named_barrier_arrive",
    "named_barrier_sync",
    "new_barriers",
    "reinterpret",
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


@builtin
def reinterpret(memory: Any, dtype: Any, shape: Any, layout: Any, _semantic: Any = None) -> Any:
    """The same bytes of shared memory with another dtype, shape and layout: the method is `_reinterpret` in 3.6."""
    method = getattr(memory, "reinterpret", None) or memory._reinterpret
    return method(dtype, shape, layout, _semantic=_semantic)


@gluon.jit
def new_barriers(NUMBER: gl.constexpr, COUNT: gl.constexpr):
    """So many barriers in shared memory, each of so many arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(NUMBER):
        mbarrier.init(made.index(place), count=COUNT)
    return made


@gluon.jit
def consumer_release(barrier):
    """Release a buffer to the producer: every thread arrives at the mbarrier, whose count is that of threads.

    For `mbarrier.arrive`, which counts a warpgroup once, the compiler synchronizes the warpgroup before the arrival
    and, since it takes that for an access to all of shared memory, once more after it. Here no warp waits for another.
    Reads must have completed, asynchronous products been awaited, and writes been fenced.
    """
    async_copy.mbarrier_arrive(barrier, increment_count=False)


# There are 16 named barriers. Triton takes two, and one for every partition of a kernel: of six at most, where four
# warpgroups multiply and a warp loads (the rest of a warpgroup that the warp leaves counts as two).
FIRST_NAMED = gl.constexpr(8)
_THREADS = [160, 288, 416, 544]  # one to four warpgroups, and a warp
_ARRIVE = gl.constexpr({count: f"barrier.cta.arrive $1, {count}; mov.b32 $0, $1;" for count in _THREADS})
_AWAIT = gl.constexpr({count: f"barrier.cta.sync $1, {count}; mov.b32 $0, $1;" for count in _THREADS})


@gluon.jit
def named_barrier_arrive(place, GROUPS: gl.constexpr):
    """Arrive at a named barrier without waiting: GROUPS warpgroups and one waiting warp complete it.

    Consumers release K and V buffers with it: cheaper than `mbarrier.arrive`, for which the compiler synchronizes the
    warpgroup twice, and than `consumer_release`, whose counting in shared memory slows down products that read there.
    """
    lanes = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    where = lanes * 0 + (place + FIRST_NAMED)
    gl.inline_asm_elementwise(_ARRIVE[GROUPS * 128 + 32], "=r,r", [where], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def named_barrier_sync(place, GROUPS: gl.constexpr):
    """Wait, as the one warp, until GROUPS warpgroups have arrived at a named barrier, which is then free again."""
    lanes = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    where = lanes * 0 + (place + FIRST_NAMED)
    gl.inline_asm_elementwise(_AWAIT[GROUPS * 128 + 32], "=r,r", [where], dtype=gl.int32, is_pure=False, pack=1)


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
