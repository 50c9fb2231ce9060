"""Barriers in shared memory and named barriers: what arrives at them, and who waits."""

from __future__ import annotations

import threading
from typing import Any

from gluon_emulator.machine import this_machine


class Barrier:
    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phase = 0
        self.ready = False

    def stores_done(self) -> None:
        assert self.ready, "a barrier is used before it is initialized"
        assert self.pending >= 0, "a barrier is arrived at more often than it counts"
        if self.pending == 0 and self.bytes == 0:
            self.phase ^= 1
            self.pending = self.count


class Barriers:
    def __init__(self, count: int) -> None:
        self.all = [Barrier() for _ in range(count)]

    def index(self, place: Any) -> Barrier:
        return self.all[int(place)]


def barrier_init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.pending = int(count)
    barrier.ready = True


def barrier_expect(barrier: Barrier, size: int) -> None:
    barrier.pending -= 1
    barrier.bytes += int(size)
    barrier.stores_done()


def barrier_arrive(barrier: Barrier, count: int = 1, pred: Any = True) -> None:
    if bool(pred):
        barrier.pending -= int(count)
        barrier.stores_done()
    this_machine().happen(0.3)
    this_machine().pause(0.3)


def barrier_wait(barrier: Barrier, phase: Any, pred: Any = True, **_: Any) -> None:
    if bool(pred):
        parity = int(phase)
        this_machine().wait(lambda: barrier.phase != parity, f"phase {parity} of a barrier")


def named_barrier_arrive(place: Any, groups: int) -> None:
    machine, name = this_machine(), int(place)
    assert 0 <= name < 8, f"there is no named barrier {name}"
    come = machine.named.setdefault(name, set())
    assert threading.get_ident() not in come, f"a warpgroup comes to barrier {name} again before it was awaited"
    come.add(threading.get_ident())
    assert len(come) <= groups, f"more warpgroups come to barrier {name} than it counts"
    machine.happen(0.3)
    machine.pause(0.3)


def named_barrier_sync(place: Any, groups: int) -> None:
    machine, name = this_machine(), int(place)
    come = machine.named.setdefault(name, set())
    machine.wait(lambda: len(come) == groups, f"named barrier {name}")
    come.clear()
