"""The bridge between the engine, which steps in a thread of its own, and the event loop, where the clients are.

The event loop adds and aborts requests, which any thread may. The outputs of a step reach the event loop in one call,
however many requests they belong to. Sinks belong to the event loop alone, so nothing here is locked.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from anyio import to_thread

from flashkernel.engine.input_processor import PromptTooLong, RequestError
from flashkernel.engine.llm_engine import LLMEngine
from flashkernel.engine.outputs import StepOutput
from flashkernel.engine.server import errors
from flashkernel.engine.server.engine_client import EngineRequest, OutputCollector, OutputSink, check_count
from flashkernel.engine.server.metrics import Metrics

log = logging.getLogger("flashkernel.server")
IDLE_S = 0.1  # how long an idle engine takes to notice that it shall stop
STOP_S = 30.0  # longest wait for the last step


class AsyncEngine:
    """The engine's thread, and the sinks of its outputs. An `EngineClient`.

    Args:
        engine: Nobody else steps it.
        max_queue: Requests that may wait beside those that run.
    """

    def __init__(self, engine: LLMEngine, max_queue: int) -> None:
        self.capacity, self.metrics = engine.scheduler.max_num_seqs + max_queue, Metrics(engine)
        self._engine = engine
        self._sinks: dict[str, OutputSink] = {}  # by request id
        self._last_token_time: dict[str, float] = {}  # by request id
        self._draining = False
        self._stopping = threading.Event()
        self._last_step_failed = False
        self._dead = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def healthy(self) -> bool:
        """Whether the engine runs and its last step did not fail."""
        return self._thread is not None and not self._dead and not self._last_step_failed

    async def metrics_text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return self.metrics.text()

    def count_response(self, path: str, status: int) -> None:
        """Counts an HTTP response."""
        self.metrics.response(path, status)

    async def start(self) -> None:
        """Prepares structured outputs and starts the engine's thread."""
        await to_thread.run_sync(self._prepare)
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="flashkernel-engine", daemon=True)
        self._thread.start()

    def _prepare(self) -> None:
        """Makes what the first structured output would otherwise hold up all requests for."""
        try:
            self._engine.prepare_grammars()
        except RequestError as error:
            log.warning("structured outputs will be refused: %s", error)

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
        self, request_ids: Sequence[str], make_requests: Callable[[], list[EngineRequest]], timeout: float
    ) -> AsyncIterator[OutputCollector]:
        """A collector for requests with these ids. `make_requests` makes them in a thread, as it tokenizes.

        However the block is left, no request outlives it.
        """
        collector = OutputCollector(request_ids)
        async with self.serve(request_ids, collector, timeout):
            await self.add(await to_thread.run_sync(make_requests))
            yield collector

    @asynccontextmanager
    async def serve(self, request_ids: Sequence[str], sink: OutputSink, timeout: float) -> AsyncIterator[None]:
        """Requests that are added inside the block have this sink. However it is left, none outlives it.

        Args:
            request_ids: Their ids.
            sink: Takes their outputs.
            timeout: Seconds they may take.

        Raises:
            ApiError: The engine takes no such requests now.
        """
        self._admit(len(request_ids))
        self._sinks.update(dict.fromkeys(request_ids, sink))
        timer = asyncio.get_running_loop().call_later(timeout, self.abort, sink, errors.timed_out(timeout))
        try:
            yield
        finally:
            timer.cancel()
            for request_id in request_ids:
                del self._sinks[request_id]
            self._abort_requests(sink)

    async def add(self, requests: list[EngineRequest]) -> None:
        """Adds requests to the engine; ApiError if it takes one of them never."""
        if any(one.params.structured_outputs is not None for one in requests):  # it may take long to compile a grammar
            await to_thread.run_sync(self._add, requests)
        else:
            self._add(requests)

    def _add(self, requests: list[EngineRequest]) -> None:
        try:
            self._engine.add_requests((one.request_id, one.prompt, one.params, one.streaming) for one in requests)
        except PromptTooLong as error:
            raise errors.prompt_too_long(error.count, error.max_model_len) from error
        except ValueError as error:
            raise errors.bad_request(str(error)) from error

    def abort(self, sink: OutputSink, error: Exception) -> None:
        """Aborts the requests of a sink, which gets `error`; their blocks are free after the next step."""
        sink.fail(error)
        self._abort_requests(sink)

    def _admit(self, count: int) -> None:
        if self._draining:
            raise errors.shutting_down()
        if self._dead or self._thread is None:
            raise errors.engine_dead()
        check_count(count, self.capacity)
        if len(self._sinks) + count > self.capacity:
            raise errors.too_many_requests(self.capacity)

    def _abort_requests(self, sink: OutputSink) -> None:
        for request_id in sink.unfinished:
            self._engine.abort_request(request_id)

    def _abort_all(self) -> None:
        for sink in set(self._sinks.values()):
            self.abort(sink, errors.shutting_down())

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
        gaps: dict[float, int] = {}  # when the token before came -> tokens
        for output in outputs:
            request_id = output.request_id
            sink = self._sinks.get(request_id)
            if sink is not None:
                if output.token_id is not None:
                    last = self._last_token_time.get(request_id)
                    if last is not None:
                        gaps[last] = gaps.get(last, 0) + 1
                    self._last_token_time[request_id] = now
                sink.put(output)
            if output.request_output is not None:
                self._last_token_time.pop(request_id, None)
                self.metrics.finished(output.request_output)
                if output.request_output.error is not None:
                    log.error("request %s: %s", request_id, output.request_output.error)
        for last, count in gaps.items():
            self.metrics.tokens(now - last, count)

    def _fail_all(self) -> None:
        for sink in set(self._sinks.values()):
            sink.fail(errors.engine_dead())
