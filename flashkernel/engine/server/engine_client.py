"""What the API needs of an engine: `AsyncEngine` has it in this process, `RemoteEngine` in another one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from flashkernel.engine.outputs import StepOutput
from flashkernel.engine.sampling_params import SamplingParams
from flashkernel.engine.server import errors

if TYPE_CHECKING:
    from flashkernel.engine.llm import Prompt


@dataclass(frozen=True)
class EngineRequest:
    """What `LLMEngine.add_requests` is given. The prompt is text only where there is no tokenizer."""

    request_id: str
    prompt: Prompt
    params: SamplingParams
    streaming: bool


class OutputSink(Protocol):
    """Takes the outputs of one HTTP call's requests."""

    unfinished: set[str]  # ids of requests whose last output has not come

    def put(self, output: StepOutput) -> None:
        """Takes an output."""

    def fail(self, error: Exception) -> None:
        """Takes the error that ends all requests of the call which are not finished."""


class OutputCollector:
    """Collects the outputs of one HTTP call's requests until the response reads them."""

    def __init__(self, request_ids: Sequence[str]) -> None:
        self.indices = {request_id: index for index, request_id in enumerate(request_ids)}
        self.unfinished = set(request_ids)
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


class EngineClient(Protocol):
    """An engine, as the API sees it. Its methods are for the event loop alone."""

    capacity: int  # requests that may run and wait

    async def start(self) -> None:
        """Prepares for the first request."""

    async def stop(self) -> None:
        """Aborts all requests; there will be no more."""

    def drain(self, grace: float) -> None:
        """Refuses further requests; those that are not finished after `grace` seconds are aborted."""

    def generate(
        self, request_ids: Sequence[str], make_requests: Callable[[], list[EngineRequest]], timeout: float
    ) -> AbstractAsyncContextManager[OutputCollector]:
        """A collector for requests with these ids. `make_requests` makes them in a thread, as it tokenizes.

        However the block is left, no request outlives it.
        """

    def abort(self, collector: OutputCollector, error: Exception) -> None:
        """Aborts the requests of a collector, whose reader gets `error`; their blocks are free after the next step."""

    async def healthy(self) -> bool:
        """Whether the engine runs and its last step did not fail."""

    async def metrics_text(self) -> bytes:
        """All metrics in Prometheus' text format."""

    def count_response(self, path: str, status: int) -> None:
        """Counts an HTTP response."""


def check_count(count: int, capacity: int) -> None:
    """Raises ApiError for more requests in one call than can ever be admitted."""
    if count > capacity:
        raise errors.bad_request(f"there are {count} prompts; this server takes {capacity} at once", "prompt")
