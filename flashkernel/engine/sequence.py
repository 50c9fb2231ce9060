"""A request inside the engine: its tokens and how far they are computed."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field

from flashkernel.engine.detokenizer import IncrementalDetokenizer
from flashkernel.engine.grammar import Grammar
from flashkernel.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput, TokenLogprob
from flashkernel.engine.prompt_lookup import PromptLookup
from flashkernel.engine.sampling_params import SamplingParams


@dataclass(eq=False)
class Sequence:
    """State of one request, from `add_request` until it is finished. The scheduler and the engine change it."""

    request_id: str
    prompt: str | None  # None: the prompt was given as token ids
    token_ids: list[int]  # the prompt, then the generated tokens that the host has read
    params: SamplingParams
    max_tokens: int  # prompt and generated tokens together
    streaming: bool
    detokenizer: IncrementalDetokenizer | None
    grammar: Grammar | None = None  # which tokens may come next
    lookup: PromptLookup | None = None  # drafts its tokens; they are then read before the next step
    draft_rejected: bool = False  # while the tokens of a draft are read
    end_token_ids: frozenset[int] = frozenset()  # tokens that end the text
    num_prompt_tokens: int = 0
    seed: int = 0
    row: int | None = None  # of the page table; None unless it runs
    num_committed: int = 0  # tokens that the prefix cache knows
    num_in_flight: int = 0  # tokens sampled on the device that the host has not read yet
    has_sampled: bool = False  # the prompt is computed and the last token is on the device: it decodes
    finish_reason: str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=lambda: [None])  # of the first tokens
    arrival_time: float = field(default_factory=time.monotonic)
    first_token_time: float | None = None

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)
        self.seed = secrets.randbits(64) if self.params.seed is None else self.params.seed

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence, those in flight included."""
        return len(self.token_ids) + self.num_in_flight

    @property
    def can_decode(self) -> bool:
        """Whether the next step may compute the last token. A grammar and a draft need to know it first."""
        if not self.has_sampled or len(self.token_ids) + self.num_in_flight >= self.max_tokens:
            return False
        return not self.num_in_flight or (self.grammar is None and self.lookup is None)

    @property
    def scores_prompt(self) -> bool:
        """Whether log probabilities of the prompt are wanted that the host has not read yet."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens

    def add_prompt_logprob(self, position: int, logprob: TokenLogprob) -> None:
        """Takes the log probability of the token after `position`; it may come again after a preemption."""
        if len(self.prompt_logprobs) == position + 1:
            self.prompt_logprobs.append(logprob)

    def known_prompt_logprobs(self) -> tuple[TokenLogprob | None, ...] | None:
        """What an output has; None if they are not wanted."""
        return None if self.params.prompt_logprobs is None else tuple(self.prompt_logprobs)

    def output(self, error: str | None = None) -> RequestOutput:
        """The result of the finished request."""
        assert self.finish_reason is not None
        completion = CompletionOutput(
            text="" if self.detokenizer is None else self.detokenizer.text,
            token_ids=tuple(self.token_ids[self.num_prompt_tokens :]),
            finish_reason=self.finish_reason,
            logprobs=None if self.params.logprobs is None else tuple(self.logprobs),
        )
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=tuple(self.token_ids[: self.num_prompt_tokens]),
            outputs=(completion,),
            metrics=RequestMetrics(self.arrival_time, self.first_token_time, time.monotonic()),
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=self.num_preemptions,
            error=error,
            prompt_logprobs=self.known_prompt_logprobs(),
        )
