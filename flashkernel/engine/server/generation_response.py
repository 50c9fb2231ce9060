"""The response to a completion or chat request: adds it to the engine and sends the text, whole or as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
from anyio import to_thread
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from flashkernel.engine.outputs import RequestOutput, StepOutput
from flashkernel.engine.server import errors
from flashkernel.engine.server.engine_client import EngineClient, EngineRequest, OutputCollector, check_count
from flashkernel.engine.server.errors import ApiError, ClientDisconnected
from flashkernel.engine.server.formatters import PromptLogprobs, ResponseFormatter, server_sent_event
from flashkernel.engine.server.protocol import GenerationRequest
from flashkernel.engine.server.server_args import ServerArgs
from flashkernel.engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    from flashkernel.engine.llm import Prompt

DONE = "data: [DONE]\n\n"


class GenerationResponse:
    """An ASGI application for one request. However it ends, the engine has no unfinished request for it."""

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer | None,
        args: ServerArgs,
        request: GenerationRequest,
        formatter: ResponseFormatter,
    ) -> None:
        self._engine, self._tokenizer, self._args = engine, tokenizer, args
        self._request, self._formatter = request, formatter
        check_count(request.num_choices, engine.capacity)  # before so many ids are made
        self._params = request.sampling_params()
        formatter.choices_per_prompt = request.choices_per_prompt
        formatter.chunks_have_usage = request.include_usage
        self._request_ids = [f"{formatter.id}-{index}" for index in range(request.num_choices)]
        self._finished: dict[int, RequestOutput] = {}  # by index of the choice
        self._started: set[int] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._engine.generate(self._request_ids, self._make_requests, self._args.timeout) as collector:
            watcher = asyncio.create_task(self._watch(receive, collector))
            try:
                with _given_up_after(self._args.client_timeout, send) as limited:
                    if self._request.streaming:
                        await self._stream(collector, limited)
                    else:
                        await self._send_whole(collector, scope, receive, limited)
            finally:
                watcher.cancel()

    @property
    def _unfinished(self) -> bool:
        """Whether outputs are missing; the collector may have the last ones already."""
        return len(self._finished) < len(self._request_ids)

    def _make_requests(self) -> list[EngineRequest]:
        """A request for each choice; runs in a thread, as it tokenizes."""
        each = self._request.choices_per_prompt
        try:
            prompts = [self._tokenized(prompt) for prompt in self._request.prompts(self._tokenizer)]
            if self._formatter.needs_prompts:
                shown = [self._text_and_tokens(*prompt) for prompt in prompts]
                self._formatter.take_prompts([one for one in shown for _ in range(each)])
        except ValueError as error:
            raise errors.bad_request(str(error)) from error
        requests = []
        for index, request_id in enumerate(self._request_ids):
            params = self._params
            if index % each and params.seed is not None:  # the choices of a prompt differ
                params = replace(params, seed=(params.seed + index % each) % 2**63)
            if index % each and not self._request.streaming:  # the first one has what is said of the prompt
                params = replace(params, prompt_logprobs=None)
            requests.append(EngineRequest(request_id, prompts[index // each][1], params, self._request.streaming))
        return requests

    def _tokenized(self, prompt: Prompt) -> tuple[str | None, Prompt]:
        """The text of a prompt, if it was given as text, and its tokens, if there is a tokenizer."""
        if not isinstance(prompt, str):
            return None, prompt
        return prompt, prompt if self._tokenizer is None else self._tokenizer.encode(prompt)

    def _text_and_tokens(self, text: str | None, prompt: Prompt) -> tuple[str, list[int]]:
        """What a response that echoes its prompt needs of it."""
        if isinstance(prompt, str):
            return prompt, []
        if text is None:
            text = "" if self._tokenizer is None else self._tokenizer.decode(prompt)
        return text, list(prompt)

    async def _watch(self, receive: Receive, collector: OutputCollector) -> None:
        """Aborts the requests when the client leaves."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._engine.abort(collector, ClientDisconnected())

    async def _send_whole(self, collector: OutputCollector, scope: Scope, receive: Receive, send: Send) -> None:
        while self._unfinished:
            self._keep_finished(collector, await collector.get())
        if self._params.prompt_logprobs is None:
            response = self._whole()
        else:  # for a long prompt it takes seconds, which others do not wait for
            response = await to_thread.run_sync(self._whole)
        await response(scope, receive, send)

    def _whole(self) -> JSONResponse:
        """The whole response, once all requests are finished."""
        body = self._formatter.response([self._finished[index] for index in range(len(self._request_ids))])
        return JSONResponse(body, headers={"X-Request-Id": self._formatter.id})

    async def _stream(self, collector: OutputCollector, send: Send) -> None:
        outputs = await collector.get()
        self._keep_finished(collector, outputs)  # an error before the first token still has a status of its own
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            (b"x-request-id", self._formatter.id.encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            try:
                await self._send_chunks(collector, outputs, send)
                while self._unfinished:
                    outputs = await collector.get()
                    self._keep_finished(collector, outputs)
                    await self._send_chunks(collector, outputs, send)
                end = self._end()
            except ApiError as error:
                end = server_sent_event(error.body()).encode()
            await send({"type": "http.response.body", "body": end, "more_body": False})
        except ClientDisconnected:
            pass

    async def _send_chunks(self, collector: OutputCollector, outputs: list[StepOutput], send: Send) -> None:
        body = "".join(self._events(collector, outputs))
        if body:
            await send({"type": "http.response.body", "body": body.encode(), "more_body": True})

    def _end(self) -> bytes:
        outputs = [self._finished[index] for index in sorted(self._finished)]
        events = map(self._formatter.event, self._formatter.last_chunks(outputs, self._request.include_usage))
        return "".join([*events, DONE if self._formatter.ends_with_done else ""]).encode()

    def _keep_finished(self, collector: OutputCollector, outputs: list[StepOutput]) -> None:
        """Keeps finished requests; ApiError if one failed or was aborted."""
        for output in outputs:
            finished = output.request_output
            if finished is None:
                continue
            if finished.outputs[0].finish_reason == "error":
                raise errors.engine_failed()
            if finished.outputs[0].finish_reason == "abort":
                raise errors.shutting_down()
            self._finished[collector.indices[output.request_id]] = finished

    def _events(self, collector: OutputCollector, outputs: list[StepOutput]) -> Iterator[str]:
        """The events of each choice that has new text; if the client is slow, an event has several tokens."""
        if len(outputs) == 1:
            yield self._event(collector.indices[outputs[0].request_id], outputs)
            return
        by_choice: dict[int, list[StepOutput]] = {}
        for output in outputs:
            by_choice.setdefault(collector.indices[output.request_id], []).append(output)
        for index, new in by_choice.items():
            yield self._event(index, new)

    def _event(self, index: int, new: list[StepOutput]) -> str:
        """The events of new outputs of one choice; "" if there is nothing to say."""
        first = ""
        if index not in self._started:
            self._started.add(index)
            first = "".join(map(self._formatter.event, self._formatter.first_chunks(index, _prompt_logprobs(new[0]))))
        text = "".join([output.text for output in new])
        logprobs = [output.logprob for output in new if output.logprob is not None]
        done = new[-1].request_output
        reason = None if done is None else done.outputs[0].finish_reason
        if text or logprobs or reason is not None:
            return first + self._formatter.events(index, text, logprobs or None, reason)
        return first


def _prompt_logprobs(first: StepOutput) -> PromptLogprobs | None:
    """What comes with the first output of a request, or with all of it."""
    return first.prompt_logprobs if first.request_output is None else first.request_output.prompt_logprobs


@contextmanager
def _given_up_after(seconds: float, send: Send) -> Iterator[Send]:
    """`send` for use inside, where a message that the client does not read within `seconds` ends the block.

    One timer serves all messages: a timeout for each costs more than sending it.
    """
    loop = asyncio.get_running_loop()
    began: float | None = None  # when the message that is being sent was given
    timer: asyncio.TimerHandle

    async def sending(message: Message) -> None:
        nonlocal began
        began = loop.time()
        await send(message)
        began = None

    def look() -> None:
        nonlocal timer
        left = seconds if began is None else began + seconds - loop.time()
        if left > 0:
            timer = loop.call_later(left, look)
        else:
            scope.cancel()

    timer = loop.call_later(seconds, look)
    try:
        with anyio.CancelScope() as scope:
            yield sending
    finally:
        timer.cancel()
