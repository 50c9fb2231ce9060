"""The bridge between the engine, which steps in a thread of its own, and the event loop, where the clients are.

The event loop adds and aborts requests, which any thread may. What a step brought crosses over in one call, however
many requests it is about. Jobs belong to the event loop alone, so nothing here is locked.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from anyio import to_thread

from flashkernel.engine.core import Engine
from flashkernel.engine.sequence import Event
from flashkernel.engine.server import errors
from flashkernel.engine.server.metrics import Metrics

log = logging.getLogger("flashkernel.server")
IDLE_S = 0.1  # how long an idle engine takes to notice that it shall stop
STOP_S = 30.0  # the longest step that is waited for in the end


class Job:
    """What one call asked of the engine, one request or several, and what came of them since the last look."""

    def __init__(self, names: Sequence[str]) -> None:
        self.numbers = {name: number for number, name in enumerate(names)}
        self.unfinished = set(names)
        self.last_token: dict[str, float] = {}  # when each request had its latest, for the metrics
        self._events: list[Event] = []
        self._error: Exception | None = None
        self._news = asyncio.Event()

    def put(self, event: Event) -> None:
        self._events.append(event)
        if event.completion is not None:
            self.unfinished.discard(event.request_id)
        self._news.set()

    def fail(self, error: Exception) -> None:
        """End it from outside; the first reason counts."""
        if self._error is None and self.unfinished:
            self._error = error
            self._news.set()

    async def take(self) -> list[Event]:
        """What has come since the last time, at least one event; the error where the job was ended."""
        await self._news.wait()
        if self._error is not None:
            raise self._error
        self._news.clear()
        events, self._events = self._events, []
        return events


class Driver:
    """The engine's thread, and the jobs it works for."""

    def __init__(self, engine: Engine, capacity: int, metrics: Metrics) -> None:
        self.capacity, self.metrics = capacity, metrics
        self._engine = engine
        self._jobs: dict[str, Job] = {}  # by request
        self._draining = False
        self._leaving = threading.Event()
        self._failing = False
        self._dead = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def healthy(self) -> bool:
        """Whether the engine runs, and its last step went well."""
        return self._thread is not None and not self._dead and not self._failing

    def start(self) -> None:
        """Begin to take steps; call it on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="flashkernel-engine", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """End all jobs, and the thread."""
        self._end_all()
        self._leaving.set()
        if self._thread is not None:
            await to_thread.run_sync(self._thread.join, STOP_S)

    def drain(self, grace: float) -> None:
        """Take no further jobs; end those that are not done after so many seconds."""
        self._draining = True
        asyncio.get_running_loop().call_later(grace, self._end_all)

    @asynccontextmanager
    async def job(self, names: Sequence[str], add: Callable[[], None], timeout: float) -> AsyncIterator[Job]:
        """A job for the requests of these names, which `add` gives to the engine, in a thread: it reads the prompts.

        Whatever happens, no request outlives the block.
        """
        self._admit(len(names))
        job = Job(names)
        self._jobs.update(dict.fromkeys(names, job))
        timer = asyncio.get_running_loop().call_later(timeout, self.fail, job, errors.timed_out(timeout))
        try:
            await to_thread.run_sync(add)
            yield job
        finally:
            timer.cancel()
            for name in names:
                del self._jobs[name]
            self._abort(job)

    def fail(self, job: Job, error: Exception) -> None:
        """End a job; the pages of its requests are free after the next step, whoever still waits for its answer."""
        job.fail(error)
        self._abort(job)

    def _admit(self, count: int) -> None:
        if self._draining:
            raise errors.shutting_down()
        if self._dead or self._thread is None:
            raise errors.engine_gone()
        if count > self.capacity:
            raise errors.bad_request(f"there are {count} prompts; this server takes {self.capacity} at once", "prompt")
        if len(self._jobs) + count > self.capacity:
            raise errors.too_many_requests(self.capacity)

    def _abort(self, job: Job) -> None:
        for name in job.unfinished:
            self._engine.abort(name)

    def _end_all(self) -> None:
        for job in set(self._jobs.values()):
            self.fail(job, errors.shutting_down())

    def _run(self) -> None:
        """The engine's thread."""
        engine = self._engine
        try:
            while not self._leaving.is_set():
                if engine.wait(IDLE_S):
                    self._step()
            while engine.busy:  # what was aborted gives its pages back
                self._step()
        except BaseException:
            log.exception("the engine's thread has ended")
            self._dead = True
            self._call(self._fail_all)

    def _step(self) -> None:
        before = self._engine.failure
        events = self._engine.step()
        failure = self._engine.failure
        self._failing = failure is not before
        if self._failing:
            log.error("a step failed, and all requests with it", exc_info=failure)
        if events:
            self._call(self._deliver, events, time.monotonic())

    def _call(self, function: Callable[..., None], *values: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *values)
        except RuntimeError:  # the loop is closed: nobody is left to be told
            self._leaving.set()

    def _deliver(self, events: list[Event], now: float) -> None:
        for event in events:
            job = self._jobs.get(event.request_id)
            if job is not None:
                if event.token is not None:
                    self.metrics.token(job.last_token.get(event.request_id), now)
                    job.last_token[event.request_id] = now
                job.put(event)
            if event.completion is not None:
                self.metrics.finished(event.completion)
                if event.completion.reason == "error":
                    log.error("request %s: %s", event.request_id, event.completion.error)

    def _fail_all(self) -> None:
        for job in set(self._jobs.values()):
            job.fail(errors.engine_gone())
