"""The threads of a program, of which one runs at a time, and the events that are still to happen."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor


class Deadlock(AssertionError):
    pass


class Machine:
    """One program: threads that run one at a time, and events that are still to happen."""

    def __init__(self, program: int, programs: int, chance: random.Random) -> None:
        self.program, self.programs, self.chance = program, programs, chance
        self.parked: dict[Any, Callable[[], bool]] = {}  # threads that do not run, and what each waits for
        self.turns: dict[Any, threading.Lock] = {}  # taken while a thread is parked
        self.events: list[tuple[int, Callable[[], None]]] = []  # (thread, what happens)
        self.failure: BaseException | None = None
        self.named: dict[int, set[int]] = {}  # who has come to a named barrier
        # Of (thread, address of shared memory): what the thread wrote there since its last fence.
        self.unfenced: dict[tuple[int, int], Tensor] = {}

    def later(self, event: Callable[[], None]) -> None:
        self.events.append((threading.get_ident(), event))

    def happen(self, share: float = 1.0, thread: int | None = None) -> None:
        """Let each event under way take place with a probability; those of one thread in their order."""
        left: list[tuple[int, Callable[[], None]]] = []
        stopped: set[int] = set()
        for owner, event in self.events:
            if owner in stopped or (thread is not None and owner != thread) or self.chance.random() > share:
                stopped.add(owner)
                left.append((owner, event))
            else:
                event()
        self.events = left

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Block the calling thread until `ready`; others run meanwhile."""
        self.happen(0.5)
        if not ready():
            self._park(ready, what)
        self.pause(0.3)

    def pause(self, share: float) -> None:
        """With a probability, let the others go first."""
        if self.chance.random() < share:
            self._park(lambda: True, "its turn")

    def _park(self, ready: Callable[[], bool], what: str) -> None:
        """Hand the turn on, until it comes back to the calling thread; the seed decides who has it when."""
        thread = getattr(local, "thread", "the program")
        self.parked[thread] = ready
        turn = self.turns.setdefault(thread, taken_lock())
        try:
            self.hand_on(what)
        except BaseException:
            self.parked.pop(thread, None)
            raise
        turn.acquire()
        if self.failure is not None:
            raise self.failure

    def hand_on(self, what: str = "") -> None:
        """Give the turn to a parked thread that can go on; where none can, all that is under way happens first."""
        able = self._able()
        if not able:
            self.happen()
            able = self._able()
        if not able:
            self.failure = self.failure or Deadlock(f"program {self.program}: all wait, one for {what}")
            able = self._able()
        chosen = self.chance.choice(able)
        del self.parked[chosen]
        self.turns[chosen].release()

    def _able(self) -> list[Any]:
        """The parked threads that can go on: after a failure, all of them can."""
        return [thread for thread, ready in self.parked.items() if self.failure is not None or ready()]


def taken_lock() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


local = threading.local()


def this_machine() -> Machine:
    return local.machine
