"""The engine as a process that serves the API sees it: in another process, behind a connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

from anyio import to_thread

from flashkernel.engine.outputs import StepOutput
from flashkernel.engine.server import errors
from flashkernel.engine.server.connection import Connection
from flashkernel.engine.server.engine_client import EngineRequest, OutputCollector, check_count

ANSWER_S = 10.0  # longest wait for an answer about the engine


class RemoteEngine:
    """An `EngineClient`. The engine's process admits requests, times and counts them; see `multi_process.py`.

    Args:
        connection: To the engine's process. When it is lost, call `lost`.
        capacity: Requests that the engine takes, of all processes together.
    """

    def __init__(self, connection: Connection, capacity: int) -> None:
        self.capacity = capacity
        self._connection = connection
        self._collectors: dict[str, OutputCollector] = {}  # by request id
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._numbers = count()
        self._draining = False
        connection.handlers.update(outputs=self._on_outputs, failed=self._on_failed, answer=self._on_answer)

    async def start(self) -> None:
        """The engine has been started by its own process."""

    async def stop(self) -> None:
        """Aborts all requests; there will be no more."""
        self._connection.close()

    def drain(self, grace: float) -> None:
        """Refuses further requests. The engine's process aborts the others after `grace` seconds."""
        self._draining = True

    @asynccontextmanager
    async def generate(
        self, request_ids: Sequence[str], make_requests: Callable[[], list[EngineRequest]], timeout: float
    ) -> AsyncIterator[OutputCollector]:
        """A collector for requests with these ids. `make_requests` makes them in a thread, as it tokenizes.

        However the block is left, no request outlives it. What the engine refuses, the collector's reader is told.
        """
        check_count(len(request_ids), self.capacity)
        if self._draining:
            raise errors.shutting_down()
        collector = OutputCollector(request_ids)
        self._collectors.update(dict.fromkeys(request_ids, collector))
        try:
            requests = await to_thread.run_sync(make_requests)
            if not self._connection.is_open:
                raise errors.engine_dead()
            self._connection.send("add", requests, timeout)
            yield collector
        finally:
            for request_id in request_ids:
                del self._collectors[request_id]
            self._connection.send("leave", request_ids[0])

    def abort(self, collector: OutputCollector, error: Exception) -> None:
        """Aborts the requests of a collector, whose reader gets `error`; their blocks are free after the next step."""
        collector.fail(error)
        self._connection.send("leave", next(iter(collector.indices)))

    async def healthy(self) -> bool:
        """Whether the engine runs and its last step did not fail."""
        return await self._ask("healthy", False)

    async def metrics_text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        found = await self._ask("metrics_text", None)
        if found is None:
            raise errors.engine_dead()
        return found

    def count_response(self, path: str, status: int) -> None:
        """Counts an HTTP response."""
        self._connection.send("count_response", path, status)

    async def _ask(self, what: str, otherwise: Any) -> Any:
        """What the engine's process answers; `otherwise` if it does not."""
        if not self._connection.is_open:
            return otherwise
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self._connection.send("ask", number, what)
        try:
            return await asyncio.wait_for(answer, ANSWER_S)
        except (asyncio.TimeoutError, ConnectionError):
            return otherwise
        finally:
            del self._asked[number]

    def _on_outputs(self, outputs: list[tuple[Any, ...]]) -> None:
        """Takes what one step has for requests of this process."""
        for values in outputs:
            output = StepOutput._make(values)
            collector = self._collectors.get(output.request_id)
            if collector is not None:  # else its client has left
                collector.put(output)

    def _on_failed(self, request_ids: list[str], error: errors.ApiError) -> None:
        """Takes the error that ends these requests."""
        for request_id in request_ids:
            collector = self._collectors.get(request_id)
            if collector is not None:
                collector.fail(error)

    def _on_answer(self, number: int, value: Any) -> None:
        """Takes the answer to `_ask`."""
        answer = self._asked.get(number)
        if answer is not None and not answer.done():
            answer.set_result(value)

    def lost(self) -> None:
        """The engine's process is gone."""
        for collector in set(self._collectors.values()):
            collector.fail(errors.engine_dead())
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(ConnectionError("the engine's process is gone"))
