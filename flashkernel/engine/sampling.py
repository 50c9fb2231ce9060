"""How a request wants its tokens chosen, and where its text ends."""

from __future__ import annotations

import math
from dataclasses import dataclass

MOST_LOGPROBS = 20
MOST_STOPS = 16


@dataclass(frozen=True)
class SamplingParams:
    """Settings of one request; a wrong value raises ValueError here, before anything is computed.

    temperature 0 takes the likeliest token; above, tokens are drawn after top_k (0: off), top_p and min_p (a share of
    the likeliest token's probability) have left out the unlikely ones, in this order. repetition_penalty divides
    logits of tokens that the prompt or the output has; presence_penalty and frequency_penalty are subtracted for
    tokens of the output, once and as often as they came. The same `seed` gives the same draws in any company.

    The text ends at max_tokens (None: where the context ends), at the model's stop tokens unless `ignore_eos`, at one
    of `stop_tokens`, or before one of the strings `stop`. `logprobs` asks for the log of each token's probability, and
    for so many of the likeliest ones.
    """

    max_tokens: int | None = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_tokens", tuple(self.stop_tokens or ()))
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1, None)
        _whole("top_k", self.top_k, 0, None)
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, "0 would leave no token; use temperature=0 for the likeliest")
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, "1 is no penalty")
        _number("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _number("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        for name in ("top_p", "repetition_penalty"):
            if getattr(self, name) == 0:
                raise ValueError(f"sampling: {name} is 0; it must be above")
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, 0, MOST_LOGPROBS)
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63), 2**64 - 1)
        if len(stop) > MOST_STOPS or not all(isinstance(text, str) and text for text in stop):
            raise ValueError(f"sampling: stop is {list(stop)!r}; it takes up to {MOST_STOPS} strings, none empty")
        for token in self.stop_tokens:
            _whole("a stop token", token, 0, None)

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


def _whole(name: str, value: object, least: int, most: int | None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
        bounds = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"sampling: {name} is {value!r}; it must be a whole number, {bounds}")


def _number(name: str, value: object, least: float, most: float, hint: str = "") -> None:
    fits = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not fits or not least <= value <= most:  # type: ignore[operator]
        more = f"; {hint}" if hint else ""
        raise ValueError(f"sampling: {name} is {value!r}; it must be a number from {least:g} to {most:g}{more}")
