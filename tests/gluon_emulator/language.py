"""The names that kernels use, and what the emulator runs in their place."""

from __future__ import annotations

import types
from typing import Any

import torch

from gluon_emulator.barriers import (
    barrier_arrive,
    barrier_expect,
    barrier_init,
    barrier_wait,
    named_barrier_arrive,
    named_barrier_sync,
)
from gluon_emulator.instructions import (
    Copies,
    add_tile,
    allocate,
    inline_asm,
    load_tile,
    mma,
    mma_wait,
    store_tile,
    store_wait,
)
from gluon_emulator.machine import this_machine
from gluon_emulator.memory import atomic_add, fence_async_shared, load_global, reinterpret, store_global
from gluon_emulator.values import UNSIGNED, as_tensors, as_value, where
from gluon_emulator.warps import specialize, specialize_warps

LANGUAGE = types.SimpleNamespace(
    uint32=UNSIGNED, cast=lambda x, dtype: as_value(torch.as_tensor(x)).to(dtype),
    int1=torch.bool,
    float32=torch.float32, int32=torch.int32, int64=torch.int64, bfloat16=torch.bfloat16, float16=torch.float16,
    float8e4nv=torch.float8_e4m3fn, constexpr=None, inline_asm_elementwise=inline_asm,
    static_range=range, static_assert=lambda *a: None,
    program_id=lambda axis: as_value(torch.tensor(this_machine().program)),
    num_programs=lambda axis: as_value(torch.tensor(this_machine().programs)),
    allocate_shared_memory=allocate,
    warp_specialize=specialize,
    SliceLayout=lambda *a: None, DotOperandLayout=lambda *a: None, NVMMADistributedLayout=lambda *a, **k: None,
    NVMMASharedLayout=types.SimpleNamespace(get_default_for=lambda *a, **k: None),
    arange=lambda start, end, layout=None: as_value(torch.arange(start, end)),
    zeros=lambda shape, dtype, layout=None: as_value(torch.zeros([int(x) for x in shape], dtype=dtype)),
    full=lambda shape, value, dtype, layout=None: as_value(torch.full([int(x) for x in shape], value, dtype=dtype)),
    zeros_like=torch.zeros_like, to_tensor=lambda x: as_value(torch.as_tensor(x)),
    convert_layout=lambda x, layout: x,
    load=load_global, store=store_global, atomic_add=atomic_add,
    where=where, broadcast=torch.broadcast_tensors,
    minimum=lambda a, b: torch.minimum(*as_tensors(a, b)), maximum=lambda a, b: torch.maximum(*as_tensors(a, b)),
    max=lambda x, axis: x.amax(axis), sum=lambda x, axis: x.sum(axis),
    associative_scan=lambda x, axis, combine: x.cumsum(axis).to(x.dtype), BlockedLayout=lambda *a: None,
    exp2=torch.exp2, log2=torch.log2, exp=torch.exp, abs=torch.abs, sigmoid=torch.sigmoid,
    fma=lambda a, b, c: a * b + c, split=lambda x: x.unbind(-1), join=lambda a, b: torch.stack((a, b), -1),
)  # fmt: skip
MBARRIER = types.SimpleNamespace(
    init=barrier_init, expect=barrier_expect, arrive=barrier_arrive, wait=barrier_wait, MBarrierLayout=lambda: "barrier"
)
KNOWN: dict[str, Any] = {
    "gl": LANGUAGE, "tl": LANGUAGE, "mbarrier": MBARRIER, "tma": types.SimpleNamespace(store_wait=store_wait),
    "load_tile": load_tile, "store_tile": store_tile, "add_tile": add_tile,
    "specialize_warps": specialize_warps,
    "reinterpret": reinterpret, "fence_async_shared": fence_async_shared, "synchronize": lambda: None,
    "consumer_release": lambda barrier: barrier_arrive(barrier, 128),
    "copy_async": Copies.copy,
    "async_copy": types.SimpleNamespace(
        commit_group=Copies.commit, wait_group=Copies.wait
    ),
    "named_barrier_sync_warpgroup": named_barrier_sync,
    "named_barrier_arrive": named_barrier_arrive, "named_barrier_sync": named_barrier_sync,
    "warpgroup_mma": mma, "warpgroup_mma_wait": mma_wait,
    "gdc_wait": lambda: None, "gdc_launch_dependents": lambda: None,
}  # fmt: skip
