"""A request on its way: its tokens, where it stands, and what came out of it."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field

from flashkernel.engine.sampling import SamplingParams
from flashkernel.engine.tokenizer import TextStream


@dataclass(frozen=True)
class Logprob:
    """The log of a token's probability, and the likeliest tokens' at its place."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Timing:
    """Seconds on the clock of time.monotonic."""

    arrived: float
    first_token: float | None
    finished: float

    @property
    def to_first_token(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.arrived


@dataclass(frozen=True)
class Completion:
    """A finished request. `reason` is "stop", "length", "abort" or "error"; `error` then says what went wrong."""

    request_id: str
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str
    reason: str
    timing: Timing
    cached_tokens: int  # of the prompt, found in the cache
    preemptions: int
    logprobs: tuple[Logprob, ...] | None = None
    error: str | None = None


@dataclass(frozen=True)
class Event:
    """News of a request: a token, the text that can be shown since the last event, and at the end the completion."""

    request_id: str
    token: int | None = None
    text: str = ""
    logprob: Logprob | None = None
    completion: Completion | None = None


@dataclass(eq=False)
class Sequence:
    """A request as the scheduler and the engine see it."""

    request_id: str
    number: int  # in order of arrival
    tokens: list[int]  # the prompt, then what has been read back
    params: SamplingParams
    limit: int  # the most tokens it may have
    streaming: bool
    stream: TextStream | None
    prompt_length: int = 0
    seed: int = 0
    row: int | None = None  # in the cache, while it runs
    committed: int = 0  # tokens that its pages can be found by
    in_flight: int = 0  # tokens that were drawn on the device and are not read back yet
    drawn: bool = False  # its last token lies on the device
    reason: str | None = None
    cached_tokens: int = 0
    preemptions: int = 0
    logprobs: list[Logprob] = field(default_factory=list)
    arrived: float = field(default_factory=time.monotonic)
    first_token: float | None = None

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)
        given = self.params.seed
        self.seed = secrets.randbits(64) if given is None else given

    @property
    def total(self) -> int:
        """Tokens it has, those in flight included."""
        return len(self.tokens) + self.in_flight

    def complete(self, error: str | None = None) -> Completion:
        assert self.reason is not None
        return Completion(
            request_id=self.request_id,
            prompt_tokens=tuple(self.tokens[: self.prompt_length]),
            tokens=tuple(self.tokens[self.prompt_length :]),
            text="" if self.stream is None else self.stream.text,
            reason=self.reason,
            timing=Timing(self.arrived, self.first_token, time.monotonic()),
            cached_tokens=self.cached_tokens,
            preemptions=self.preemptions,
            logprobs=None if self.params.logprobs is None else tuple(self.logprobs),
            error=error,
        )
