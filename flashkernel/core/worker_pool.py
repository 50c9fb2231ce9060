"""A pool of worker processes that survives workers that crash or hang.

`concurrent.futures` abandons all work when one process dies. Here a task whose worker died, or did not answer in time,
is returned with the reason, and a new worker replaces it.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from flashkernel.core import signals

START_TIMEOUT_S = 300.0  # for a worker to import its modules on a busy machine
_READY = "ready"


class WorkerPool:
    """`workers` processes that run `function(*arguments, task)`; all of it must be picklable.

    A result whose `worker_is_broken` is true comes from a process that must not be used again.

    Args:
        function: What a worker runs.
        arguments: Its arguments before the task.
        workers: Processes, at most.
        timeout_s: For one task.
        start_method: "spawn" imports all modules in every worker. "fork" shares the parent's, and takes any function
            and arguments; neither the parent nor, after a fork, a worker may then use CUDA.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        workers: int,
        timeout_s: float,
        start_method: str = "spawn",
    ) -> None:
        self.function, self.arguments = function, tuple(arguments)
        self.workers, self.timeout_s, self.start_method = workers, timeout_s, start_method

    def run(self, batches: Iterator[Sequence[Any]]) -> Iterator[tuple[Any, Any, str]]:
        """Yields (task, result, ""), or (task, None, reason) for a task whose worker died or hung.

        A batch stays with one worker. The next one is taken when a worker is free, so `batches` may end at any time.
        Closing the generator, or an exception in it such as Ctrl-C, kills all workers.
        """
        workers: list[_Worker] = []
        try:
            first = next(batches, None)
            while first is not None or any(worker.batch or worker.task is not None for worker in workers):
                free = next((worker for worker in workers if worker.task is None and not worker.batch), None)
                if first is not None and free is None and len(workers) < self.workers:
                    free = self._start()
                    workers.append(free)
                if first is not None and free is not None:
                    free.batch.extend(first)
                    free.send_next()
                    first = next(batches, None)
                    continue
                for worker in self._wait(workers):
                    found = worker.receive()
                    if not worker.alive:
                        workers.remove(worker)
                        if worker.batch:  # a new worker gets the rest of its batch
                            workers.append(self._start(worker.batch))
                    if found is not None:
                        yield found
        finally:
            _stop(workers)

    def _start(self, batch: Sequence[Any] = ()) -> _Worker:
        return _Worker(self.function, self.arguments, self.timeout_s, batch, self.start_method)

    def _wait(self, workers: list[_Worker]) -> list[_Worker]:
        """Waits until a worker has sent something, has died or is past its deadline; returns all such workers."""
        deadline = min(worker.deadline for worker in workers)
        ready = wait([worker.connection for worker in workers], max(0.0, deadline - time.monotonic()))
        now = time.monotonic()
        return [worker for worker in workers if worker.connection in ready or now >= worker.deadline]


class _Worker:
    """One process, its current task, and the tasks that follow."""

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        timeout_s: float,
        batch: Sequence[Any],
        start_method: str,
    ) -> None:
        context: Any = multiprocessing.get_context(start_method)
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, function, arguments), daemon=True)
        with signals.handled(signal.SIGINT, signal.SIG_IGN):  # a terminal sends Ctrl-C to all; the parent stops them
            self.process.start()
        theirs.close()  # so that the pipe closes when the process ends
        self.timeout_s, self.batch = timeout_s, deque(batch)
        self.task: Any = None
        self.ready = False
        self.alive = True
        self.deadline = time.monotonic() + START_TIMEOUT_S

    def send_next(self) -> None:
        """Sends the next task if the process has started, is idle, and there is one."""
        if not self.ready or self.task is not None:
            return
        self.deadline = float("inf")
        if self.batch:
            self.task = self.batch.popleft()
            self.deadline = time.monotonic() + self.timeout_s
            with suppress(OSError):  # the process is gone; the next receive() reports it
                self.connection.send(self.task)

    def receive(self) -> tuple[Any, Any, str] | None:
        """Returns (task, result, ""), (task, None, reason) if the process is gone, or None for a start message."""
        task = self.task
        try:
            if not self.connection.poll():
                return self._lost(f"no answer within {self.timeout_s:.0f} s: its process was killed")
            result = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            return self._lost(f"its process died: {_exit(self.process.exitcode)}")
        if not self.ready:
            self.ready = True
            self.send_next()
            return None
        self.task = None
        if getattr(result, "worker_is_broken", False):
            self._end()
        else:
            self.send_next()
        return task, result, ""

    def _lost(self, reason: str) -> tuple[Any, Any, str] | None:
        self._end()
        if not self.ready:
            raise RuntimeError(f"a worker did not start: {reason}; what it printed is above")
        return None if self.task is None else (self.task, None, reason)

    def _end(self) -> None:
        self.alive = False
        _stop([self])


def _serve(connection: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """The worker's loop: receives tasks and sends results until the other end closes."""
    connection.send(_READY)
    while True:
        try:
            task = connection.recv()
            result = function(*arguments, task)
            connection.send(result)
        except (EOFError, BrokenPipeError):
            return


def _stop(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.connection.close()
        worker.process.kill()
    for worker in workers:
        worker.process.join()


def _exit(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {-code} ({signal.Signals(-code).name})"
    return f"exit code {code}"
