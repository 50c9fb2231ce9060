"""What is asynchronous: copies of tiles, matrix products, cp.async; and the allocation of shared memory."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from gluon_emulator.barriers import Barrier, Barriers
from gluon_emulator.machine import local, this_machine
from gluon_emulator.memory import Descriptor, Pointer, Shared, check_fenced, mark_written
from gluon_emulator.values import as_value, poison


def load_tile(source: Descriptor, place: Any, barrier: Barrier, target: Shared) -> None:
    place = [int(x) for x in place]
    check_fenced(target.data)
    target.data.fill_(poison(target.dtype))  # under way: whoever reads it now reads nothing

    def arrive() -> None:
        target.data.copy_(source.read(place).view(target.data.shape))
        barrier.bytes -= source.block_type.nbytes
        barrier.stores_done()

    this_machine().later(arrive)


def store_tile(target: Descriptor, place: Any, source: Shared) -> None:
    place = [int(x) for x in place]
    check_fenced(source.data)
    this_machine().later(lambda: target.write(place, source.data.clone()))


def add_tile(target: Descriptor, place: Any, source: Shared) -> None:
    place = [int(x) for x in place]
    check_fenced(source.data)
    this_machine().later(lambda: target.write(place, target.read(place) + source.data.view(target.block)))


class Product:
    """A matrix product under way."""

    def __init__(self, a: Any, b: Shared, accumulator: Tensor, use: bool) -> None:
        self.operands = (a, b, accumulator, use)
        self.value: Tensor | None = None
        if this_machine().chance.random() < 0.5:
            self.finish()

    def finish(self) -> Tensor:
        if self.value is None:
            a, b, accumulator, use = self.operands
            left = (a.data if isinstance(a, Shared) else a).float()
            product = left @ b.data.float()
            if isinstance(accumulator, Product):  # issued before, and so completed before
                accumulator = accumulator.finish()
            self.value = as_value(product + accumulator if use else product)
        return self.value


def mma(a: Any, b: Shared, accumulator: Any, use_acc: Any = True, is_async: bool = False, **_: Any) -> Any:
    for operand in (a, b):
        if isinstance(operand, Shared):
            check_fenced(operand.data)
    product = Product(a.clone() if isinstance(a, Tensor) else a, b, accumulator, bool(use_acc))
    queue = local.__dict__.setdefault("products", [])
    queue.append(product)
    return product if is_async else product.finish()


def mma_wait(left: int = 0, deps: Any = ()) -> Any:
    this_machine().pause(0.3)
    queue = local.__dict__.setdefault("products", [])
    while len(queue) > left:
        queue.pop(0).finish()
    values = []
    for product in deps:  # one that is still under way can only be accumulated onto, or awaited again
        under_way = not isinstance(product, Product) or product in queue
        values.append(product if under_way else product.finish())
    return values[0] if len(values) == 1 else tuple(values)


def store_wait(pending: int) -> None:
    """All but the last `pending` stores of this thread have happened."""
    machine, thread = this_machine(), threading.get_ident()
    own = [event for event in machine.events if event[0] == thread]
    later = own[len(own) - int(pending) :]
    machine.events = [event for event in machine.events if event not in later]
    machine.happen(1.0, thread)
    machine.events += later


class Copies:
    """cp.async of a thread: groups of copies, each of which happens at some moment up to its wait."""

    @staticmethod
    def copy(target: Shared, source: Pointer, mask: Any = None) -> None:
        offset, wanted = source.places(mask)
        value = torch.where(wanted, source.storage[offset].float(), 0).to(target.dtype)
        target.data.fill_(poison(target.dtype))
        pending = [lambda: target.data.copy_(value.view(target.data.shape))]

        def finish() -> None:
            while pending:
                pending.pop()()

        local.__dict__.setdefault("copies", []).append((finish, target.data))
        this_machine().later(finish)

    @staticmethod
    def commit() -> None:
        local.__dict__.setdefault("groups", []).append(local.__dict__.pop("copies", []))

    @staticmethod
    def wait(left: int = 0) -> None:
        groups = local.__dict__.setdefault("groups", [])
        while len(groups) > left:
            for finish, written in groups.pop(0):
                finish()
                mark_written(written)


def allocate(dtype: torch.dtype, shape: Any, layout: Any) -> Any:
    sizes = [int(size) for size in shape]
    if layout == "barrier":
        return Barriers(sizes[0])
    return Shared(torch.full(sizes, poison(dtype), dtype=dtype))


def inline_asm(text: str, constraints: str, args: Any, dtype: torch.dtype, is_pure: bool, pack: int) -> Tensor:
    if "cp.async.bulk.wait_group 0" in text:
        store_wait(0)
        return args[0]
    assert "cvt.rn.satfinite.e4m3x2.f32" in text, "of inline assembly, only the conversion to e4m3 is known here"
    return args[0].clamp(-448, 448).to(dtype)
