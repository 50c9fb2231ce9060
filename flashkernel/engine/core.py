"""The engine: requests go in, steps are taken, events come out.

Any thread may add and abort requests; one thread takes steps. On a GPU a step is launched before the tokens of the one
before are read, so the device does not wait for the host: a text's end is noticed one step late, and that step's token
is dropped.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np

from flashkernel.engine.runner import Launched, Runner
from flashkernel.engine.sampler import INVALID
from flashkernel.engine.sampling import SamplingParams
from flashkernel.engine.scheduler import Scheduler
from flashkernel.engine.sequence import Event, Logprob, Sequence
from flashkernel.engine.tokenizer import TextStream, Tokenizer

NOT_FINITE = (
    "the model's logits are NaN or infinite after these tokens, so no token can be chosen; check its weights for NaN, "
    "and run it in bfloat16 or float32 if it overflows in float16"
)


class RequestError(ValueError):
    """A request that cannot be served; the message says why. No other request is touched."""


@dataclass(frozen=True)
class Stats:
    """Counts since the start, and what there is now."""

    waiting: int
    running: int
    finished: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    preemptions: int
    steps: int
    pages_in_use: int
    pages: int


class Engine:
    """Continuous batching over one model."""

    def __init__(
        self, runner: Runner, scheduler: Scheduler, tokenizer: Tokenizer | None, context: int, ahead: bool
    ) -> None:
        """`ahead`: launch a step before the tokens of the one before are read."""
        self.runner, self.scheduler, self.tokenizer, self.context = runner, scheduler, tokenizer, context
        self._ahead = ahead
        self._launched: deque[Launched] = deque()
        self._stops = frozenset(runner.model.config.stop_tokens)
        self._known: dict[str, Sequence] = {}  # requests that are not finished
        self._added: deque[Sequence] = deque()
        self._aborted: deque[str] = deque()
        self._news = threading.Condition()
        self._number = 0
        self.failure: BaseException | None = None  # why requests ended in an error, where some did
        self._counts = dict.fromkeys(("finished", "prompt", "cached", "generated", "steps"), 0)

    def add_request(
        self,
        prompt: str | Many[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        streaming: bool = True,
    ) -> str:
        """Queue a request and return its id; RequestError where it can never be served.

        A streaming request has an event for every token, another only its completion.
        """
        params = SamplingParams() if params is None else params
        tokens = self._tokens(prompt)
        self._check(tokens, params)
        limit = self.context if params.max_tokens is None else min(self.context, len(tokens) + params.max_tokens)
        stream = None
        if self.tokenizer is not None:
            stream = TextStream(self.tokenizer, params.stop, params.skip_special_tokens)
        with self._news:
            self._number += 1
            name = f"request-{self._number}" if request_id is None else request_id
            if name in self._known:
                raise RequestError(f"request {name!r} is being served already; ids must differ")
            sequence = Sequence(name, self._number, tokens, params, limit, streaming, stream)
            self._known[name] = sequence
            self._added.append(sequence)
            self._news.notify_all()
        return name

    def abort(self, request_id: str) -> None:
        """End a request; its completion, with what it has so far, comes with the next step. Unknown ids are ignored."""
        with self._news:
            self._aborted.append(request_id)
            self._news.notify_all()

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._known or self._launched)

    def wait(self, timeout: float | None = None) -> bool:
        """Sleep until there is something to do; False where nothing came in time."""
        with self._news:
            return self._news.wait_for(lambda: self.busy, timeout)

    def step(self) -> list[Event]:
        """Compute one batch and tell what came of it.

        An error, of the device or of the code, ends all requests with reason "error" and stays in `failure`; new
        requests can be served after it, if the device still can.
        """
        events: list[Event] = []
        self._take_news(events)
        try:
            batch = self.scheduler.next()
            if batch.tokens:
                self._launched.append(self.runner.launch(batch))
                self._count(batch.admitted)
            while self._launched and (len(self._launched) > self._ahead or not batch.tokens):
                self._read(self._launched.popleft(), events)
        except BaseException as error:
            self.failure = error
            self._fail(f"{type(error).__name__}: {error}", events)
            if not isinstance(error, Exception):
                raise
        return events

    def stats(self) -> Stats:
        scheduler, counts = self.scheduler, self._counts
        pool = scheduler.cache.pool
        return Stats(
            len(scheduler.waiting) + len(self._added), len(scheduler.running), counts["finished"], counts["prompt"],
            counts["cached"], counts["generated"], scheduler.preemptions, counts["steps"], pool.in_use, pool.pages - 1,
        )  # fmt: skip

    def _tokens(self, prompt: str | Many[int]) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("the model came without a tokenizer; give prompts as lists of tokens")
            return self.tokenizer.encode(prompt)
        tokens = np.asarray(prompt)
        if tokens.size == 0:
            return []
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise RequestError(f"a prompt is text or a list of token numbers, not {tokens.ndim}-dim {tokens.dtype}")
        vocab = self.runner.model.config.vocab
        if int(tokens.min()) < 0 or int(tokens.max()) >= vocab:
            wrong = tokens[(tokens < 0) | (tokens >= vocab)][0]
            raise RequestError(f"token {wrong} is not in the vocabulary, which has 0 to {vocab - 1}")
        return tokens.tolist()  # type: ignore[no-any-return]

    def _check(self, tokens: list[int], params: SamplingParams) -> None:
        if not tokens:
            raise RequestError("the prompt is empty; it takes at least one token to go on from")
        if len(tokens) >= self.context:
            raise RequestError(
                f"the prompt has {len(tokens)} tokens; the context holds {self.context}, and one must be left to "
                "generate. Shorten the prompt, or give the engine a larger context"
            )
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need text, and the model came without a tokenizer; use stop_tokens")
        if params.logprobs is not None and params.logprobs > self.runner.model.config.vocab:
            raise RequestError(f"{params.logprobs} logprobs are more than the vocabulary has")

    def _take_news(self, events: list[Event]) -> None:
        """New requests join the queue; aborted ones end."""
        with self._news:
            while self._added:
                self.scheduler.add(self._added.popleft())
            aborted = [self._known[name] for name in self._aborted if name in self._known]
            self._aborted.clear()
        for sequence in dict.fromkeys(aborted):
            self._finish(sequence, "abort", events)

    def _count(self, admitted: list[Sequence]) -> None:
        self._counts["steps"] += 1
        for sequence in admitted:
            if not sequence.preemptions:
                self._counts["prompt"] += sequence.prompt_length
                self._counts["cached"] += sequence.cached_tokens

    def _read(self, launched: Launched, events: list[Event]) -> None:
        """Tokens that have arrived go to their sequences."""
        tokens, logprobs = launched.read()
        now = time.monotonic()
        for place, (sequence, token) in enumerate(zip(launched.sequences, tokens)):
            sequence.in_flight -= 1
            if sequence.reason is None:
                self._accept(sequence, token, None if logprobs is None else logprobs[place], now, events)

    def _accept(self, sequence: Sequence, token: int, logprob: Logprob | None, now: float, events: list[Event]) -> None:
        params, stream = sequence.params, sequence.stream
        if token == INVALID:
            self._finish(sequence, "error", events, error=NOT_FINITE)
            return
        sequence.tokens.append(token)
        self._counts["generated"] += 1
        if sequence.first_token is None:
            sequence.first_token = now
        if params.logprobs is None:
            logprob = None
        elif logprob is not None:
            logprob = Logprob(token, logprob.logprob, logprob.top[: params.logprobs])
            sequence.logprobs.append(logprob)
        ends = (token in self._stops and not params.ignore_eos) or token in params.stop_tokens
        if stream is not None and not ends:
            stream.push(token, now=sequence.streaming or bool(params.stop))
        reason = None
        if ends or (stream is not None and stream.stopped):
            reason = "stop"
        elif len(sequence.tokens) >= sequence.limit:
            reason = "length"
        if reason is not None:
            self._finish(sequence, reason, events, token, logprob)
        elif sequence.streaming:
            text = "" if stream is None else stream.take()
            events.append(Event(sequence.request_id, token, text, logprob))

    def _finish(
        self,
        sequence: Sequence,
        reason: str,
        events: list[Event],
        token: int | None = None,
        logprob: Logprob | None = None,
        error: str | None = None,
    ) -> None:
        sequence.reason = reason
        self.scheduler.finish(sequence)
        text = ""
        if sequence.stream is not None:
            sequence.stream.close()
            text = sequence.stream.take(final=True)
        with self._news:
            del self._known[sequence.request_id]
        self._counts["finished"] += 1
        events.append(Event(sequence.request_id, token, text, logprob, sequence.complete(error)))

    def _fail(self, message: str, events: list[Event]) -> None:
        """What a failed step leaves behind is unknown: all requests end, and nothing stays in the cache."""
        self._launched.clear()
        self._take_news(events)
        for sequence in list(self._known.values()):
            self._finish(sequence, "error", events, error=message)
        self.scheduler.forget()
