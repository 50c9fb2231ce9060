"""Gluon (Triton with explicit layouts and barriers) under one set of names for triton 3.6 to 3.9.

Kernels import these names: versions after 3.6 renamed the TMA copies and `reinterpret`. Triton functions, such as a
mask, can be called from a Gluon kernel as they are.

Creating a TMA tensor descriptor takes about as long as a launch, and every call needs several: `descriptor_fields`
computes once what descriptors of one kind share, and `make_descriptor` creates them from that.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction
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
    "async_copy",
    "consumer_release",
    "copy_async",
    "descriptor_fields",
    "fence_async_shared",
    "gl",
    "gluon",
    "load_tile",
    "make_descriptor",
    "mbarrier",
    "named_barrier_arrive",
    "named_barrier_sync",
    "named_barrier_sync_warpgroup",
    "new_barriers",
    "reinterpret",
    "specialize_warps",
    "store_tile",
    "synchronize",
    "tma",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]

load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
copy_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared  # cp.async by address
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
synchronize = getattr(gl, "thread_barrier", None) or gl.barrier


@builtin
def _add_tile(tensor_desc: Any, coord: Any, src: Any, _semantic: Any = None) -> None:
    """TMA reduce: adds a tile in shared memory to one in global memory. 3.6 compiles it but has no function for it."""
    coordinates = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coordinates, src.handle
    )


add_tile = getattr(tma, "async_atomic_add", None) or _add_tile


@builtin
def reinterpret(memory: Any, dtype: Any, shape: Any, layout: Any, _semantic: Any = None) -> Any:
    """Returns the same shared memory with another dtype, shape and layout (`_reinterpret` in 3.6)."""
    method = getattr(memory, "reinterpret", None) or memory._reinterpret
    return method(dtype, shape, layout, _semantic=_semantic)


@builtin
def specialize_warps(
    consumer: Any, consumer_args: Any, num_consumers: Any, consumer_registers: Any, producer: Any, producer_args: Any,
    producer_registers: Any, producer_warps: Any = 1, _semantic: Any = None, _generator: Any = None,
) -> None:  # fmt: skip
    """Run `consumer(w, *consumer_args)` in `num_consumers` warpgroups and `producer(*producer_args)` in one warp, or
    in `producer_warps`. Registers are per thread.

    `gl.warp_specialize` takes its partitions as a list, and a list of functions cannot be computed inside a kernel.
    """
    count, *registers = (int(getattr(x, "value", x)) for x in (num_consumers, consumer_registers, producer_registers))
    consumer_args = [gl.constexpr(x) if isinstance(x, GluonJITFunction) else x for x in consumer_args]
    partitions = [(consumer, gl.tuple([gl.constexpr(w), *consumer_args])) for w in range(count)]
    workers = count - 1  # the first consumer runs in the kernel's own warps
    warps = int(getattr(producer_warps, "value", producer_warps))
    gl.warp_specialize(
        [*partitions, (producer, producer_args)], [4] * workers + [warps], registers[:1] * workers + registers[1:],
        _semantic=_semantic, _generator=_generator,
    )  # fmt: skip


@gluon.jit
def new_barriers(NUMBER: gl.constexpr, COUNT: gl.constexpr):
    """Returns NUMBER initialized mbarriers in shared memory; COUNT arrivals complete a phase."""
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(index), count=COUNT)
    return barriers


@gluon.jit
def consumer_release(barrier):
    """Releases a buffer to the producer: every thread arrives at the mbarrier, whose count is the number of threads.

    `mbarrier.arrive` counts a warpgroup once. The compiler synchronizes the warpgroup before it and, since it takes it
    for an access to all of shared memory, once more after it. Here no warp waits for another. Reads must have
    completed, WGMMAs been awaited, and writes been fenced.
    """
    async_copy.mbarrier_arrive(barrier, increment_count=False)


# An SM has 16 named barriers. Triton uses two, and one for every partition of a kernel: up to six, for four consumer
# warpgroups and a producer warp (the other warps of the producer's warpgroup count as two partitions).
FIRST_NAMED_BARRIER = gl.constexpr(8)
_THREADS = [160, 288, 416, 544]  # one to four warpgroups, and a warp
_ARRIVE = gl.constexpr({count: f"barrier.cta.arrive $1, {count}; mov.b32 $0, $1;" for count in _THREADS})
_SYNC = gl.constexpr({count: f"barrier.cta.sync $1, {count}; mov.b32 $0, $1;" for count in _THREADS})


@gluon.jit
def named_barrier_arrive(barrier, NUM_CONSUMERS: gl.constexpr):
    """Arrives at a named barrier without waiting: NUM_CONSUMERS warpgroups and one waiting warp complete it.

    Consumers release K and V stages with it. It is cheaper than `mbarrier.arrive`, for which the compiler synchronizes
    the warpgroup twice, and than `consumer_release`, which counts in shared memory and slows down WGMMAs that read it.
    """
    lane = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    name = lane * 0 + (barrier + FIRST_NAMED_BARRIER)
    gl.inline_asm_elementwise(_ARRIVE[NUM_CONSUMERS * 128 + 32], "=r,r", [name], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def named_barrier_sync(barrier, NUM_CONSUMERS: gl.constexpr):
    """The producer warp waits until NUM_CONSUMERS warpgroups have arrived at a named barrier, which is then free."""
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    name = lane * 0 + (barrier + FIRST_NAMED_BARRIER)
    gl.inline_asm_elementwise(_SYNC[NUM_CONSUMERS * 128 + 32], "=r,r", [name], dtype=gl.int32, is_pure=False, pack=1)


_SYNC_FIRST_WARP = gl.constexpr({
    count: "{ .reg .pred first; .reg .b32 thread; mov.u32 thread, %tid.x; and.b32 thread, thread, 127; "
    f"setp.lt.u32 first, thread, 32; @first barrier.cta.sync $1, {count}; mov.b32 $0, $1; }}"
    for count in _THREADS
})  # fmt: skip


@gluon.jit
def named_barrier_sync_warpgroup(barrier, NUM_CONSUMERS: gl.constexpr):
    """`named_barrier_sync` of a producer of four warps: the first one waits at the barrier, the others for it."""
    lane = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    name = lane * 0 + (barrier + FIRST_NAMED_BARRIER)
    text: gl.constexpr = _SYNC_FIRST_WARP[NUM_CONSUMERS * 128 + 32]
    gl.inline_asm_elementwise(text, "=r,r", [name], dtype=gl.int32, is_pure=False, pack=1)
    synchronize()


class _CachedReprLayout(gl.NVMMASharedLayout):
    """A layout with a cached repr, which Triton asks for at every launch."""

    text: str

    def __repr__(self) -> str:
        return self.text


def descriptor_fields(like: Tensor, box: list[int], layout: gl.NVMMASharedLayout) -> dict[str, Any]:
    """Returns the fields that TMA descriptors of tensors like this one share; `like` may be a meta tensor."""
    cached = object.__new__(_CachedReprLayout)
    cached.__dict__.update(vars(layout), text=repr(layout))
    return vars(TensorDescriptor(like, list(like.shape), list(like.stride()), box, cached))


def make_descriptor(fields: dict[str, Any], base: Tensor, shape: Sequence[int], strides: list[int]) -> Any:
    """Returns the TMA descriptor of a tensor, with the shared `fields`."""
    descriptor = object.__new__(TensorDescriptor)
    descriptor.__dict__.update(fields, base=base, shape=shape, strides=strides)
    return descriptor
