"""Warp specialization: each warp is a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from gluon_emulator.machine import local, taken_lock, this_machine


def specialize(functions: Any, warps: Any, registers: Any) -> None:
    machine = this_machine()

    def work(thread: int, function: Callable[..., None], args: Any) -> None:
        local.machine, local.thread = machine, thread
        machine.turns[thread].acquire()
        try:
            with torch.no_grad():
                function(*args)
            assert not local.__dict__.get("products"), "a product is never awaited"
        except BaseException as error:
            machine.failure = machine.failure or error
        while machine.parked:
            try:
                machine.hand_on("those that are done")
                break
            except BaseException as error:  # of what happened meanwhile
                machine.failure = machine.failure or error

    threads = [threading.Thread(target=work, args=(place, *pair)) for place, pair in enumerate(functions)]
    for place, thread in enumerate(threads):
        machine.turns[place] = taken_lock()
        machine.parked[place] = lambda: True
        thread.start()
    machine.hand_on()
    for thread in threads:
        thread.join()
    if machine.failure is not None:
        raise machine.failure
    assert not any(machine.named.values()), "a named barrier is left half full"
    machine.happen()


def specialize_warps(
    consumer: Any, consumer_args: Any, num_consumers: int, registers: int, producer: Any, producer_args: Any, *_: int
) -> None:
    consumers = [(consumer, (w, *consumer_args)) for w in range(num_consumers)]
    specialize([*consumers, (producer, producer_args)], None, None)
