"""Formats outputs as OpenAI's API does, whole or in chunks."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from flashkernel.engine.outputs import RequestOutput, TokenLogprob
from flashkernel.engine.server.output_parsers import OutputParser, Parsed
from flashkernel.engine.server.protocol import CompletionRequest
from flashkernel.engine.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0  # for a probability of zero: JSON has no infinity
PromptLogprobs = Sequence[TokenLogprob | None]  # None for a token that nothing stands before
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # the text of a token that is no whole character
encode_json = json.JSONEncoder(separators=(",", ":")).encode


def server_sent_event(value: dict[str, Any]) -> str:
    """One server-sent event, named if it has a type. In plain ASCII, for readers that take other characters for ends of
    lines."""
    name = f"event: {value['type']}\n" if "type" in value else ""
    return f"{name}data: {encode_json(value)}\n\n"


class ResponseFormatter:
    """Formats the response of one call; each prompt has `choices_per_prompt` choices."""

    prefix, response_object, chunk_object = "", "", ""

    def __init__(self, model: str, tokenizer: Tokenizer | None) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._model, self._tokenizer, self._created = model, tokenizer, int(time.time())
        self.choices_per_prompt = 1
        self.needs_prompts = False
        self.chunks_have_usage = False  # a usage of null, in each chunk before the one that has it
        self._text_events: dict[int, tuple[str, str]] = {}  # by choice: what stands before and after a chunk's text
        self._prompts: list[tuple[str, list[int]]] = []

    def take_prompts(self, prompts: Sequence[tuple[str, list[int]]]) -> None:
        """Takes the text and the tokens of each choice's prompt, if it `needs_prompts`."""
        self._prompts = list(prompts)

    def response(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The whole response."""
        choices = []
        for index, output in enumerate(outputs):
            done = output.outputs[0]
            choices.append(self.choice(index, done.text, done.logprobs, done.finish_reason))
        return {**self._object(self.response_object, choices), "usage": self.usage(outputs)}

    def usage(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """OpenAI's usage object of a call."""
        return usage(outputs, self.choices_per_prompt)

    def prompt_logprobs(self, output: RequestOutput) -> list[Any] | None:
        """Log probabilities of a prompt as vLLM's server has them; None if they were not asked for."""
        if output.prompt_logprobs is None:
            return None
        return [None if one is None else self._by_token(one) for one in output.prompt_logprobs]

    def _by_token(self, one: TokenLogprob) -> dict[str, Any]:
        found = {
            str(token): {"logprob": max(logprob, MIN_LOGPROB), "rank": rank, "decoded_token": self._token_text(token)}
            for rank, (token, logprob) in enumerate(one.top_logprobs, 1)
        }
        own = {"logprob": max(one.logprob, MIN_LOGPROB), "rank": one.rank}
        return {**found, str(one.token_id): {**own, "decoded_token": self._token_text(one.token_id)}}

    def first_chunk(self, index: int) -> dict[str, Any] | None:
        """The chunk before the text of a choice; None if there is none."""
        return None

    def events(self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None, reason: str | None) -> str:
        """The events of new text; "" while a parser holds it back."""
        raise NotImplementedError

    def event(self, chunk: dict[str, Any]) -> str:
        """The event of a chunk."""
        has_usage = self.chunks_have_usage and "choices" in chunk and "usage" not in chunk
        return server_sent_event({**chunk, "usage": None} if has_usage else chunk)

    def _text_event(self, index: int, text: str) -> str:
        """The event of a chunk that has text alone. All but the text is the same each time and encoded once."""
        if index not in self._text_events:
            mark = f"text of {self.id}"  # which nothing else in the chunk is
            chunk = self._object(self.chunk_object, [self._text_choice(index, mark)])
            before, _, after = self.event(chunk).partition(encode_json(mark))
            self._text_events[index] = before, after
        before, after = self._text_events[index]
        return f"{before}{encode_json(text)}{after}"

    def _text_choice(self, index: int, text: str) -> dict[str, Any]:
        """A choice of a chunk that has text alone."""
        raise NotImplementedError

    ends_with_done = True  # a stream's last event is [DONE]

    def first_chunks(self, index: int, scores: PromptLogprobs | None = None) -> list[dict[str, Any]]:
        """The chunks before the text of a choice; `scores` are log probabilities of its prompt."""
        first = self.first_chunk(index)
        return [] if first is None else [first]

    def last_chunks(self, outputs: Sequence[RequestOutput], include_usage: bool) -> list[dict[str, Any]]:
        """The chunks at the end of a stream."""
        return [self.usage_chunk(outputs)] if include_usage else []

    def usage_chunk(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The last chunk of a stream with `include_usage`."""
        return {**self._object(self.chunk_object, []), "usage": self.usage(outputs)}

    def choice(
        self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None, reason: str | None
    ) -> dict[str, Any]:
        """A choice of the whole response."""
        raise NotImplementedError

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model, "choices": choices}

    def _token_text(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._tokenizer is None else self._tokenizer.token_text(token_id)


class CompletionFormatter(ResponseFormatter):
    """Responses of /v1/completions."""

    prefix, response_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, tokenizer: Tokenizer | None, request: CompletionRequest) -> None:
        super().__init__(model, tokenizer)
        self._request = request
        self._offsets: dict[int, int] = {}  # characters of each choice so far
        self.needs_prompts = bool(request.echo)

    def response(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        found = []
        for index, output in enumerate(outputs):
            first = outputs[index - index % self.choices_per_prompt]  # has the log probabilities of the prompt
            echoed = self._echo(index, first.prompt_logprobs) if self._request.echo else None
            done = output.outputs[0]
            choice = self.choice(index, done.text, done.logprobs, done.finish_reason)
            if echoed is not None:
                choice["text"] = echoed["text"] + choice["text"]
                choice["logprobs"] = _appended(echoed["logprobs"], choice["logprobs"])
            if self._request.prompt_logprobs is not None:
                choice["prompt_logprobs"] = self.prompt_logprobs(first)
            found.append(choice)
        return {**self._object(self.response_object, found), "usage": self.usage(outputs)}

    def usage(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        found = super().usage(outputs)
        if not self._request.generates:
            found |= {"completion_tokens": 0, "total_tokens": found["prompt_tokens"]}
        return found

    def first_chunks(self, index: int, scores: PromptLogprobs | None = None) -> list[dict[str, Any]]:
        return [self._object(self.chunk_object, [self._echo(index, scores)])] if self._request.echo else []

    def choice(
        self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None, reason: str | None
    ) -> dict[str, Any]:
        if not self._request.generates:
            text, logprobs, reason = "", None, reason and "length"  # the token that was left out may be an end
        found = None if logprobs is None else self._logprobs(index, [one.token_id for one in logprobs], logprobs)
        return {"index": index, "text": text, "logprobs": found, "finish_reason": reason}

    def events(self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None, reason: str | None) -> str:
        if logprobs is None and reason is None and self._request.generates:
            return self._text_event(index, text)
        return self.event(self._object(self.chunk_object, [self.choice(index, text, logprobs, reason)]))

    def _text_choice(self, index: int, text: str) -> dict[str, Any]:
        return self.choice(index, text, None, None)

    def _echo(self, index: int, scores: PromptLogprobs | None) -> dict[str, Any]:
        """The prompt as the beginning of a choice."""
        text, token_ids = self._prompts[index]
        wanted = scores is not None and self._request.logprobs is not None
        found = self._logprobs(index, token_ids, scores) if wanted and scores is not None else None
        return {"index": index, "text": text, "logprobs": found, "finish_reason": None}

    def _logprobs(self, index: int, token_ids: Sequence[int], logprobs: PromptLogprobs) -> dict[str, Any]:
        """Log probabilities of tokens; the first token of a prompt has none."""
        texts = [self._token_text(token) for token in token_ids]
        offset, offsets = self._offsets.get(index, 0), []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        self._offsets[index] = offset
        most = self._request.logprobs or 0
        return {
            "tokens": texts,
            "token_logprobs": [None if one is None else max(one.logprob, MIN_LOGPROB) for one in logprobs],
            "top_logprobs": [
                None
                if one is None
                else {
                    self._token_text(token): max(log, MIN_LOGPROB)  # the token itself, too, as OpenAI's
                    for token, log in (*one.top_logprobs[:most], (one.token_id, one.logprob))
                }
                for one in logprobs
            ],
            "text_offset": offsets,
        }


def _appended(first: dict[str, Any] | None, second: dict[str, Any] | None) -> dict[str, Any] | None:
    """The log probabilities of a prompt and of what was generated after it."""
    if first is None or second is None:
        return first or second
    return {name: first[name] + second[name] for name in first}


class ChatFormatter(ResponseFormatter):
    """Responses of /v1/chat/completions."""

    prefix, response_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self, model: str, tokenizer: Tokenizer | None, parser: Callable[[], OutputParser] = OutputParser
    ) -> None:
        super().__init__(model, tokenizer)
        self._parser = parser
        self._parsers: dict[int, OutputParser] = {}  # of streams, by choice
        self._called: dict[int, int] = {}  # tool calls of each choice so far

    def choice(
        self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None, reason: str | None
    ) -> dict[str, Any]:
        parsed = self._parser().whole(text)
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content, "refusal": None}
        if parsed.reasoning:
            message["reasoning_content"] = parsed.reasoning
        if parsed.tool_calls:
            message["tool_calls"] = [call.as_dict() for call in parsed.tool_calls]
            message["content"] = parsed.content or None
            reason = "tool_calls" if reason == "stop" else reason
        return {"index": index, "message": message, "logprobs": self._logprobs(logprobs), "finish_reason": reason}

    def response(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        scores = self.prompt_logprobs(outputs[0])
        return {**super().response(outputs), **({} if scores is None else {"prompt_logprobs": scores})}

    def first_chunk(self, index: int) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._object(self.chunk_object, [choice])

    def events(self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None, reason: str | None) -> str:
        parsed = self._feed(index, text, reason)
        if logprobs is None and reason is None and not parsed.reasoning and not parsed.tool_calls:
            return self._text_event(index, parsed.content) if parsed.content else ""  # a parser may hold it back
        choice = {
            "index": index, "delta": self._delta(index, parsed), "logprobs": self._logprobs(logprobs),
            "finish_reason": "tool_calls" if reason == "stop" and self._called.get(index) else reason,
        }  # fmt: skip
        return self.event(self._object(self.chunk_object, [choice]))

    def _text_choice(self, index: int, text: str) -> dict[str, Any]:
        return {"index": index, "delta": {"content": text}, "logprobs": None, "finish_reason": None}

    def _feed(self, index: int, text: str, reason: str | None) -> Parsed:
        """The parts of new text; the last text has a reason."""
        parser = self._parsers.get(index)
        if parser is None:
            parser = self._parsers[index] = self._parser()
        parsed = parser.feed(text)
        if reason is not None:
            parsed.add(parser.finish())
        return parsed

    def _delta(self, index: int, parsed: Parsed) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if parsed.content:
            delta["content"] = parsed.content
        if parsed.reasoning:
            delta["reasoning_content"] = parsed.reasoning
        if parsed.tool_calls:
            first = self._called.get(index, 0)
            delta["tool_calls"] = [
                {"index": number, **call.as_dict()} for number, call in enumerate(parsed.tool_calls, first)
            ]
            self._called[index] = first + len(parsed.tool_calls)
        return delta

    def _logprobs(self, logprobs: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
        if logprobs is None:
            return None
        content = [
            {**self._entry(one.token_id, one.logprob), "top_logprobs": [self._entry(*top) for top in one.top_logprobs]}
            for one in logprobs
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._token_text(token)
        known = None if REPLACEMENT in text else list(text.encode())
        return {"token": text, "logprob": max(logprob, MIN_LOGPROB), "bytes": known}


def usage(outputs: Sequence[RequestOutput], choices_per_prompt: int = 1) -> dict[str, Any]:
    """OpenAI's usage object of a call; a prompt with several choices counts once."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs[::choices_per_prompt])
    cached = sum(output.num_cached_tokens for output in outputs[::choices_per_prompt])
    completion = sum(len(output.outputs[0].token_ids) for output in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
