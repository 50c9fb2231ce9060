"""The emulator of Gluon finds what is wrong with barriers, and buffers that are handed back too early."""

from __future__ import annotations

import random

import gluon_emulator
import pytest
import torch
from gluon_emulator.barriers import Barrier, barrier_arrive, barrier_init, barrier_wait
from gluon_emulator.machine import Deadlock, Machine, local

from flashkernel.core.gluon import (
    TensorDescriptor,
    fence_async_shared,
    gl,
    gluon,
    load_tile,
    mbarrier,
    store_tile,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashkernel.core.launch import Launch


def test_the_emulator_finds_what_is_wrong_with_barriers() -> None:
    machine = Machine(0, 1, random.Random(0))
    local.machine = machine
    barrier = Barrier()
    barrier_init(barrier, 2)
    barrier_arrive(barrier)
    with pytest.raises(Deadlock):
        barrier_wait(barrier, 0)
    machine.failure = None
    barrier_arrive(barrier)
    barrier_wait(barrier, 0)
    with pytest.raises(AssertionError, match="more often"):
        barrier_arrive(barrier, count=3)


@gluon.jit
def _load_two(x, tile, full, empty):
    for step in range(2):
        mbarrier.wait(empty.index(0), (step & 1) ^ 1)
        mbarrier.expect(full.index(0), x.block_type.nbytes)
        load_tile(x, [step * 64, 0], full.index(0), tile)


@gluon.jit
def _square_two(out, tile, full, empty, EARLY: gl.constexpr):
    for step in range(2):
        mbarrier.wait(full.index(0), step & 1)
        nothing = gl.zeros([64, 64], gl.float32, None)
        later = warpgroup_mma(tile, tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
        if EARLY:
            mbarrier.arrive(empty.index(0), count=1)
        product = warpgroup_mma_wait(0, deps=[later])
        if not EARLY:
            mbarrier.arrive(empty.index(0), count=1)
        gl.store(out + step, gl.sum(gl.sum(product, 1), 0))


@gluon.jit
def _square_kernel(out, x, EARLY: gl.constexpr):
    tile = gl.allocate_shared_memory(x.dtype, [64, 64], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(full.index(0), count=1)
    mbarrier.init(empty.index(0), count=1)
    gl.warp_specialize([(_square_two, (out, tile, full, empty, EARLY)), (_load_two, (x, tile, full, empty))], [1], [24])


@pytest.mark.parametrize("early", [False, True])
def test_the_emulator_finds_a_buffer_handed_back_too_early(early: bool) -> None:
    """A product reads its operands until it is awaited: a buffer given up before that may be overwritten."""
    x = torch.randn(128, 64).to(torch.float16)
    described = TensorDescriptor(x, [128, 64], [64, 1], [64, 64], gl.NVMMASharedLayout(128, 16))
    expected = torch.stack([(part @ part.T).sum() for part in x.float().split(64)])
    right = []
    for seed in range(10):
        out = torch.zeros(2)
        gluon_emulator.run(Launch(_square_kernel, (1,), (out, described), {"EARLY": early}), seed=seed)
        right.append(torch.allclose(out, expected, rtol=1e-3))
    assert all(right) != early


@gluon.jit
def _fence_kernel(out, x, EARLY: gl.constexpr, LATE: gl.constexpr):
    tile = gl.allocate_shared_memory(x.dtype, [64, 64], x.layout)
    if EARLY:
        fence_async_shared()
    tile.store(gl.zeros([64, 64], gl.float16, None))
    if LATE:
        fence_async_shared()
    product = warpgroup_mma(tile, tile.permute((1, 0)), gl.zeros([64, 64], gl.float32, None), is_async=True)
    gl.store(out, gl.sum(gl.sum(warpgroup_mma_wait(0, deps=[product]), 1), 0))
    store_tile(x, [0, 0], tile)
    tma.store_wait(0)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_the_emulator_finds_a_missing_fence(early: bool, late: bool) -> None:
    """WGMMA and TMA see what a thread wrote to shared memory only if it fenced after the write."""
    x, out = torch.ones(64, 64).half(), torch.ones(1)
    described = TensorDescriptor(x, [64, 64], [64, 1], [64, 64], gl.NVMMASharedLayout(128, 16))
    launch = Launch(_fence_kernel, (1,), (out, described), {"EARLY": early, "LATE": late})
    if late:
        gluon_emulator.run(launch)
        assert float(out) == float(x.abs().max()) == 0
    else:
        with pytest.raises(AssertionError, match="without a fence"):
            gluon_emulator.run(launch)
