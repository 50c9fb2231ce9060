"""What requests return: `RequestOutput` when a request is finished, `StepOutput` after each step of a streamed one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class TokenLogprob:
    """Log probability of one token, generated or of the prompt.

    Args:
        token_id: The token.
        logprob: Natural log of its probability, before temperature, penalties and truncation.
        top_logprobs: (token id, log probability) of the most likely tokens at this position, best first; as many as
            `SamplingParams.logprobs` (`prompt_logprobs`) asked for.
        rank: Its place among all tokens by probability; 1 is the most likely one.

    Example:
        >>> from flashkernel.engine import TokenLogprob
        >>> TokenLogprob(7, -0.5, ((7, -0.5), (3, -1.2))).top_logprobs[0]
        (7, -0.5)
    """

    token_id: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...] = ()
    rank: int = 1


@dataclass(frozen=True)
class RequestMetrics:
    """When a request arrived, had its first token and finished, in seconds of `time.monotonic`.

    Args:
        arrival_time: `add_request` was called.
        first_token_time: The host read the first generated token; None if there was none.
        finished_time: The request finished.

    Example:
        >>> from flashkernel.engine import RequestMetrics
        >>> RequestMetrics(arrival_time=1.0, first_token_time=1.25, finished_time=3.0).time_to_first_token
        0.25
    """

    arrival_time: float
    first_token_time: float | None
    finished_time: float

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token; None if there was none."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass(frozen=True)
class CompletionOutput:
    """One generated text.

    Args:
        text: The generated text, without the prompt and without a stop string; "" if the model has no tokenizer.
        token_ids: The generated tokens, a stop token included.
        finish_reason: "stop" (a stop token or stop string), "length" (`max_tokens` or `max_model_len`), "abort" or
            "error".
        logprobs: One entry for each generated token; None if `SamplingParams.logprobs` is None.
        index: Position among the request's `n` completions.

    Example:
        >>> from flashkernel.engine import CompletionOutput
        >>> CompletionOutput(text=" blue", token_ids=(4, 9), finish_reason="length").finish_reason
        'length'
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[TokenLogprob, ...] | None = None
    index: int = 0


@dataclass(frozen=True)
class RequestOutput:
    """A finished request.

    Args:
        request_id: The id that `add_request` returned.
        prompt: The prompt as text; None if it was given as token ids.
        prompt_token_ids: The prompt as token ids.
        outputs: The completions, `SamplingParams.n` of them.
        metrics: When the request arrived, had its first token and finished.
        num_cached_tokens: Prompt tokens whose keys and values were found in the prefix cache.
        num_preemptions: How often the request lost its blocks and was scheduled again.
        error: What went wrong, if `finish_reason` is "error"; else None.
        prompt_logprobs: One entry for each token of the prompt, None for the first, before which nothing stands; None
            if `SamplingParams.prompt_logprobs` is None.

    Example:
        >>> from flashkernel.engine import LLM, SamplingParams
        >>> from flashkernel.engine.dummy_weights import tiny_transformer
        >>> llm = LLM(tiny_transformer(), kv_cache_tokens=64)
        >>> output = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4))[0]
        >>> output.prompt_token_ids, len(output.outputs[0].token_ids), output.outputs[0].finish_reason
        ((1, 2, 3), 4, 'length')
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    metrics: RequestMetrics
    num_cached_tokens: int
    num_preemptions: int
    error: str | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None


class StepOutput(NamedTuple):  # made for every streamed token, which takes a frozen dataclass four times as long
    """What one engine step produced for one request.

    A streamed request has one for each token; any other request has one, when it is finished.

    Args:
        request_id: The request.
        token_id: The new token; None if the request ended without one (abort, error).
        text: New text, ready to be shown. Text that may become a stop string, or half a character, is held back.
        logprob: Log probability of `token_id`, if `SamplingParams.logprobs` asked for it.
        request_output: The whole result, if the request is finished; else None.
        prompt_logprobs: As in `RequestOutput`, with the first token.

    Example:
        >>> from flashkernel.engine import LLM, SamplingParams
        >>> from flashkernel.engine.dummy_weights import tiny_transformer
        >>> llm = LLM(tiny_transformer(), kv_cache_tokens=64)
        >>> steps = list(llm.stream([1, 2, 3], SamplingParams(max_tokens=2)))
        >>> [step.finished for step in steps]
        [False, True]
        >>> steps[-1].request_output.outputs[0].token_ids == tuple(step.token_id for step in steps)
        True
    """

    request_id: str
    token_id: int | None = None
    text: str = ""
    logprob: TokenLogprob | None = None
    request_output: RequestOutput | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None

    @property
    def finished(self) -> bool:
        """Whether the request is finished; `request_output` then has the whole result."""
        return self.request_output is not None
