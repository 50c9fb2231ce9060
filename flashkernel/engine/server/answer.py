"""The answer to a request for text: the engine is asked, and what it makes is sent, whole or as it comes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import anyio
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from flashkernel.engine.llm import LLM
from flashkernel.engine.sequence import Completion, Event
from flashkernel.engine.server import errors
from flashkernel.engine.server.driver import Driver, Job
from flashkernel.engine.server.errors import ApiError, ClientGone
from flashkernel.engine.server.options import ServerOptions
from flashkernel.engine.server.protocol import Request
from flashkernel.engine.server.replies import Reply

DONE = b"data: [DONE]\n\n"


class Answer:
    """An ASGI application for one request. When it ends, however it ends, the engine has nothing left to do for it."""

    def __init__(self, driver: Driver, llm: LLM, options: ServerOptions, wanted: Request, reply: Reply) -> None:
        self._driver, self._llm, self._options = driver, llm, options
        self._wanted, self._reply = wanted, reply
        self._params = wanted.sampling()
        self._names = [f"{reply.id}-{number}" for number in range(wanted.choices)]
        self._done: dict[int, Completion] = {}
        self._begun: set[int] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._driver.job(self._names, self._add, self._options.timeout) as job:
            watcher = asyncio.create_task(self._watch(receive, job))
            try:
                if self._wanted.streams:
                    await self._stream(job, send)
                else:
                    await self._whole(job, scope, receive, send)
            finally:
                watcher.cancel()

    @property
    def _unfinished(self) -> bool:
        """Whether there is more to come; the job may know of an end that was not taken from it yet."""
        return len(self._done) < len(self._names)

    def _add(self) -> None:
        """Give the prompts to the engine; this runs in a thread."""
        try:
            for name, prompt in zip(self._names, self._wanted.prompts(self._llm.tokenizer)):
                self._llm.engine.add_request(
                    prompt, self._params, request_id=name, streaming=self._wanted.streams
                )  # fmt: skip
        except ValueError as error:
            raise errors.bad_request(str(error)) from error

    async def _watch(self, receive: Receive, job: Job) -> None:
        """End the job when its client leaves."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._driver.fail(job, ClientGone())

    async def _whole(self, job: Job, scope: Scope, receive: Receive, send: Send) -> None:
        while self._unfinished:
            self._note(job, await job.take())
        body = self._reply.whole([self._done[number] for number in range(len(self._names))])
        await JSONResponse(body, headers={"X-Request-Id": self._reply.id})(scope, receive, send)

    async def _stream(self, job: Job, send: Send) -> None:
        events = await job.take()
        self._note(job, events)  # an error before the first token still has a status of its own
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            (b"x-request-id", self._reply.id.encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            try:
                await self._send_chunks(job, events, send)
                while self._unfinished:
                    events = await job.take()
                    self._note(job, events)
                    await self._send_chunks(job, events, send)
                end = self._end()
            except ApiError as error:
                end = _frame(error.body())
            await self._send(send, end, more=False)
        except ClientGone:
            pass

    async def _send_chunks(self, job: Job, events: list[Event], send: Send) -> None:
        body = b"".join(map(_frame, self._chunks(job, events)))
        if body:
            await self._send(send, body)

    async def _send(self, send: Send, body: bytes, more: bool = True) -> None:
        """ClientGone where the client does not read."""
        try:
            with anyio.fail_after(self._options.client_timeout):
                await send({"type": "http.response.body", "body": body, "more_body": more})
        except TimeoutError:
            raise ClientGone from None

    def _end(self) -> bytes:
        if not self._wanted.usage_in_stream:
            return DONE
        return _frame(self._reply.usage_chunk(list(self._done.values()))) + DONE

    def _note(self, job: Job, events: list[Event]) -> None:
        """Keep completions; ApiError where one is none."""
        for event in events:
            done = event.completion
            if done is None:
                continue
            if done.reason == "error":
                raise errors.engine_failed()
            if done.reason == "abort":
                raise errors.shutting_down()
            self._done[job.numbers[event.request_id]] = done

    def _chunks(self, job: Job, events: list[Event]) -> Iterator[dict[str, Any]]:
        """What is new, in one chunk for each choice: where the client is slow, tokens gather."""
        fresh: dict[int, list[Event]] = {}
        for event in events:
            fresh.setdefault(job.numbers[event.request_id], []).append(event)
        for number, news in fresh.items():
            if number not in self._begun:
                self._begun.add(number)
                opening = self._reply.begin(number)
                if opening is not None:
                    yield self._with_usage(opening)
            text = "".join(event.text for event in news)
            logprobs = [event.logprob for event in news if event.logprob is not None]
            reason = next((event.completion.reason for event in news if event.completion is not None), None)
            if text or logprobs or reason is not None:
                yield self._with_usage(self._reply.chunk(number, text, logprobs or None, reason))

    def _with_usage(self, chunk: dict[str, Any]) -> dict[str, Any]:
        """A stream that ends with its usage says so in every chunk."""
        return {**chunk, "usage": None} if self._wanted.usage_in_stream else chunk


def _frame(value: dict[str, Any]) -> bytes:
    """One server-sent event. In plain ASCII, for readers that take other characters for ends of lines."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"
