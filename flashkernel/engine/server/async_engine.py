"""The bridge between the engine, which steps in a thread of its own, and the event loop, where the clients are.

The event loop adds and aborts requests, which any thread may. The outputs of a step reach the event loop in one call,
however many requests they belong to. Collectors belong to the event loop alone, so nothing here is locked.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from anyio import to_thread

from flashkernel.engine.llm_engine import LLMEngine
from flashkernel.engine.outputs import StepOutput
from flashkernel.engine.server import errors
from flashkernel.engine.server.metrics import Metrics

log = logging.getLogger("flashkernel.server")
IDLE_S = 0.1  # how long an idle engine takes to notice that it shall stop
STOP_S = 30.0  # longest wait for the last step


class OutputCollector:
    """Collects the outputs of one HTTP call's requests until the response reads them."""

    def __init__(self, request_ids: Sequence[str]) -> None:
        self.indices = {request_id: index for index, request_id in enumerate(request_ids)}
        self.unfinished = set(request_ids)
        self.last_token_time: dict[str, float] = {}  # of each request, for the metrics
        self._outputs: list[StepOutput] = []
        self._error: Exception | None = None
        self._ready = asyncio.Event()

    def put(self, output: StepOutput) -> None:
        """Adds an output."""
        self._outputs.append(output)
        if output.request_output is not None:
            self.unfinished.discard(output.request_id)
        self._ready.set()

    def fail(self, error: Exception) -> None:
        """Makes `get` raise `error`; the first error counts, and none after the last output."""
        if self._error is None and self.unfinished:
            self._error = error
            self._ready.set()

    async def get(self) -> list[StepOutput]:
        """Waits for outputs and returns all that came since the last call."""
        await self._ready.wait()
        if self._error is not None:
            raise self._error
        self._ready.clear()
        outputs, self._outputs = self._outputs, []
        return outputs


class AsyncEngine:
    """The engine's thread, and the collectors of its outputs."""

    def __init__(self, engine: LLMEngine, capacity: int, metrics: Metrics) -> None:
        self.capacity, self.metrics = capacity, metrics
        self._engine = engine
        self._collectors: dict[str, OutputCollector] = {}  # by request id
        self._draining = False
        self._stopping = threading.Event()
        self._last_step_failed = False
        self._dead = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def healthy(self) -> bool:
        """Whether the engine runs and its last step did not fail."""
        return self._thread is not None and not self._dead and not self._last_step_failed

    def start(self) -> None:
        """Starts the engine's thread; call it on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="flashkernel-engine", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """Aborts all requests and ends the thread."""
        self._abort_all()
        self._stopping.set()
        if self._thread is not None:
            await to_thread.run_sync(self._thread.join, STOP_S)

    def drain(self, grace: float) -> None:
        """Refuses further requests; aborts those that are not finished after `grace` seconds."""
        self._draining = True
        asyncio.get_running_loop().call_later(grace, self._abort_all)

    @asynccontextmanager
    async def generate(
        self, request_ids: Sequence[str], add: Callable[[], None], timeout: float
    ) -> AsyncIterator[OutputCollector]:
        """A collector for these requests. `add` adds them to the engine; it runs in a thread, as it tokenizes.

        However the block is left, no request outlives it.
        """
        self._admit(len(request_ids))
        collector = OutputCollector(request_ids)
        self._collectors.update(dict.fromkeys(request_ids, collector))
        timer = asyncio.get_running_loop().call_later(timeout, self.abort, collector, errors.timed_out(timeout))
        try:
            await to_thread.run_sync(add)
            yield collector
        finally:
            timer.cancel()
            for request_id in request_ids:
                del self._collectors[request_id]
            self._abort_requests(collector)

    def abort(self, collector: OutputCollector, error: Exception) -> None:
        """Aborts the requests of a collector, whose reader gets `error`; their blocks are free after the next step."""
        collector.fail(error)
        self._abort_requests(collector)

    def check_count(self, count: int) -> None:
        """Raises ApiError for more requests in one call than can ever be admitted."""
        if count > self.capacity:
            raise errors.bad_request(f"there are {count} prompts; this server takes {self.capacity} at once", "prompt")

    def _admit(self, count: int) -> None:
        if self._draining:
            raise errors.shutting_down()
        if self._dead or self._thread is None:
            raise errors.engine_dead()
        self.check_count(count)
        if len(self._collectors) + count > self.capacity:
            raise errors.too_many_requests(self.capacity)

    def _abort_requests(self, collector: OutputCollector) -> None:
        for request_id in collector.unfinished:
            self._engine.abort_request(request_id)

    def _abort_all(self) -> None:
        for collector in set(self._collectors.values()):
            self.abort(collector, errors.shutting_down())

    def _run(self) -> None:
        """The engine's thread."""
        engine = self._engine
        try:
            while not self._stopping.is_set():
                if engine.wait(IDLE_S):
                    self._step()
            while engine.has_unfinished_requests():  # aborted requests return their blocks
                self._step()
        except BaseException:
            log.exception("the engine's thread has ended")
            self._dead = True
            self._call(self._fail_all)

    def _step(self) -> None:
        before = self._engine.failure
        outputs = self._engine.step()
        failure = self._engine.failure
        self._last_step_failed = failure is not before
        if self._last_step_failed:
            log.error("a step failed, and all requests with it", exc_info=failure)
        if outputs:
            self._call(self._deliver, outputs, time.monotonic())

    def _call(self, function: Callable[..., None], *values: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *values)
        except RuntimeError:  # the loop is closed
            self._stopping.set()

    def _deliver(self, outputs: list[StepOutput], now: float) -> None:
        before: dict[float | None, int] = {}  # when their last token came -> tokens
        for output in outputs:
            collector = self._collectors.get(output.request_id)
            if collector is not None:
                if output.token_id is not None:
                    last = collector.last_token_time.get(output.request_id)
                    before[last] = before.get(last, 0) + 1
                    collector.last_token_time[output.request_id] = now
                collector.put(output)
            if output.request_output is not None:
                self.metrics.finished(output.request_output)
                if output.request_output.error is not None:
                    log.error("request %s: %s", output.request_id, output.request_output.error)
        for last, count in before.items():
            if last is not None:
                self.metrics.tokens(now - last, count)

    def _fail_all(self) -> None:
        for collector in set(self._collectors.values()):
            collector.fail(errors.engine_dead())
