"""Answers as OpenAI's API words them, whole or in chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from flashkernel.engine.sequence import Completion, Logprob
from flashkernel.engine.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0  # stands for a probability of zero: JSON has no infinity
HALF = "\N{REPLACEMENT CHARACTER}"  # what a token that is no whole character looks like


class Reply:
    """The answer of one call; a choice is one of its texts."""

    prefix, whole_object, chunk_object = "", "", ""

    def __init__(self, model: str, tokenizer: Tokenizer | None) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._model, self._tokenizer, self._created = model, tokenizer, int(time.time())

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        choices = [
            self.choice(number, done.text, done.logprobs, done.reason) for number, done in enumerate(completions)
        ]
        return {**self._frame(self.whole_object, choices), "usage": usage(completions)}

    def begin(self, number: int) -> dict[str, Any] | None:
        """What a stream says of a choice before its text, if anything."""
        return None

    def chunk(self, number: int, text: str, logprobs: Sequence[Logprob] | None, reason: str | None) -> dict[str, Any]:
        return self._frame(self.chunk_object, [self.piece(number, text, logprobs, reason)])

    def usage_chunk(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """The end of a stream that was asked for its usage."""
        return {**self._frame(self.chunk_object, []), "usage": usage(completions)}

    def choice(self, number: int, text: str, logprobs: Sequence[Logprob] | None, reason: str) -> dict[str, Any]:
        raise NotImplementedError

    def piece(self, number: int, text: str, logprobs: Sequence[Logprob] | None, reason: str | None) -> dict[str, Any]:
        raise NotImplementedError

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model, "choices": choices}

    def _token_text(self, token: int) -> str:
        return f"token_id:{token}" if self._tokenizer is None else self._tokenizer.token_text(token)


class CompletionReply(Reply):
    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, tokenizer: Tokenizer | None) -> None:
        super().__init__(model, tokenizer)
        self._offsets: dict[int, int] = {}  # characters of each choice so far

    def choice(self, number: int, text: str, logprobs: Sequence[Logprob] | None, reason: str | None) -> dict[str, Any]:
        found = None if logprobs is None else self._logprobs(number, logprobs)
        return {"index": number, "text": text, "logprobs": found, "finish_reason": reason}

    piece = choice

    def _logprobs(self, number: int, logprobs: Sequence[Logprob]) -> dict[str, Any]:
        texts = [self._token_text(one.token) for one in logprobs]
        offset, offsets = self._offsets.get(number, 0), []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        self._offsets[number] = offset
        return {
            "tokens": texts,
            "token_logprobs": [max(one.logprob, LEAST_LOGPROB) for one in logprobs],
            "top_logprobs": [
                {self._token_text(token): max(log, LEAST_LOGPROB) for token, log in one.top} for one in logprobs
            ],
            "text_offset": offsets,
        }


class ChatReply(Reply):
    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, number: int, text: str, logprobs: Sequence[Logprob] | None, reason: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": number, "message": message, "logprobs": self._logprobs(logprobs), "finish_reason": reason}

    def begin(self, number: int) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": number, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._frame(self.chunk_object, [choice])

    def piece(self, number: int, text: str, logprobs: Sequence[Logprob] | None, reason: str | None) -> dict[str, Any]:
        delta = {"content": text} if text or reason is None else {}
        return {"index": number, "delta": delta, "logprobs": self._logprobs(logprobs), "finish_reason": reason}

    def _logprobs(self, logprobs: Sequence[Logprob] | None) -> dict[str, Any] | None:
        if logprobs is None:
            return None
        content = [
            {**self._entry(one.token, one.logprob), "top_logprobs": [self._entry(*top) for top in one.top]}
            for one in logprobs
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._token_text(token)
        known = None if HALF in text else list(text.encode())
        return {"token": text, "logprob": max(logprob, LEAST_LOGPROB), "bytes": known}


def usage(completions: Sequence[Completion]) -> dict[str, Any]:
    prompt = sum(len(done.prompt_tokens) for done in completions)
    made = sum(len(done.tokens) for done in completions)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": sum(done.cached_tokens for done in completions)},
    }
