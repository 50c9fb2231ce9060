"""Sampling parameters of a request."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_LOGIT_BIAS = 300  # tokens, as OpenAI's API
MAX_BIAS_ENTRIES = 512  # logit biases of a request, and tokens that min_tokens bans
MAX_N = 128
MIN_TEMPERATURE = 1e-5  # below it vLLM is greedy, and logits divided by it may overflow
MIN_REPETITION_PENALTY = 1e-3  # logits are divided by it, and must stay finite


@dataclass(frozen=True)
class StructuredOutputs:
    """What a text must match; one of the fields. It needs `pip install 'flashkernel[grammar]'`.

    Args:
        json_schema: A JSON schema, as text or as a mapping; the text is a JSON value that it describes.
        regex: A regular expression that the whole text matches.
        json_object: The text is any JSON object.

    Raises:
        ValueError: None of them is given, or several, or the schema is no JSON.

    Example:
        >>> from flashkernel.engine import StructuredOutputs
        >>> StructuredOutputs(json_schema={"type": "integer"}).json_schema
        '{"type": "integer"}'
    """

    json_schema: str | None = None
    regex: str | None = None
    json_object: bool = False

    def __post_init__(self) -> None:
        schema: Any = self.json_schema
        if isinstance(schema, Mapping):
            object.__setattr__(self, "json_schema", json.dumps(schema))
        elif schema is not None:
            try:
                json.loads(schema)
            except (TypeError, ValueError) as error:
                raise ValueError(f"sampling: the JSON schema cannot be read: {error}") from None
        given = (self.json_schema is not None) + (self.regex is not None) + self.json_object
        if given != 1:
            raise ValueError(f"sampling: structured_outputs has {given} of json_schema, regex, json_object; give one")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of a request are chosen and when it ends; vLLM's names.

    The order is: penalties, logit biases, temperature, top_k, top_p, min_p, then one sample. Equal logits are kept or
    left out together.

    Args:
        max_tokens: Most generated tokens; None goes on to `max_model_len`.
        temperature: 0 takes the most likely token (greedy), and so does less than 1e-5; above, logits are divided by it
            and a token is sampled.
        top_k: Keeps the k most likely tokens; 0 keeps all, and so does vLLM's -1.
        top_p: Keeps the most likely tokens whose probabilities reach this sum; in (0, 1].
        min_p: Keeps tokens with at least this share of the most likely token's probability; in [0, 1].
        repetition_penalty: Divides positive logits, and multiplies negative ones, of tokens in the prompt or output.
        presence_penalty: Subtracted from logits of tokens that the output has.
        frequency_penalty: Subtracted from logits for each time that the output has the token.
        logit_bias: Numbers that are added to the logits of tokens: a mapping from token to number, or pairs.
        seed: The same seed gives the same samples, whatever else is in the batch; None takes a random one.
        n: Completions of the prompt; those after the first have seeds that follow from the first one's.
        min_tokens: So many tokens are generated before a stop token or a stop string may end the text.
        stop: A string or strings before which the text ends.
        stop_token_ids: Tokens after which generation ends, beside the model's own.
        ignore_eos: Goes on after the model's own end-of-sequence tokens.
        logprobs: Returns the log probability of each token, and of so many of the most likely ones; None: neither.
        prompt_logprobs: The same for each token of the prompt but the first. Such a prompt is computed in smaller
            chunks, and not from the prefix cache.
        skip_special_tokens: Leaves special tokens out of the text.
        structured_outputs: What the text must match.

    Raises:
        ValueError: A value is out of its range.

    Example:
        >>> from flashkernel.engine import SamplingParams
        >>> SamplingParams(temperature=0.8, top_p=0.95, seed=1, stop="\\n").stop
        ('\\n',)
        >>> SamplingParams(top_p=3.0)
        Traceback (most recent call last):
        ValueError: sampling: top_p is 3.0; it must be a number from 0 to 1; use temperature=0 for greedy sampling
    """

    max_tokens: int | None = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    n: int = 1
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else _tuple("stop", self.stop, "a string, or several")
        object.__setattr__(self, "stop", stop)
        bias: Any = self.logit_bias or ()
        object.__setattr__(self, "logit_bias", tuple(bias.items() if isinstance(bias, Mapping) else bias))
        self._take_numpy()
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1, None)
        _whole("n", self.n, 1, MAX_N)
        _whole("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        _whole("top_k", self.top_k, 0, None)
        _number("temperature", self.temperature, 0.0, 100.0)
        if self.temperature < MIN_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)
        _number("top_p", self.top_p, 0.0, 1.0, "use temperature=0 for greedy sampling")
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, 100.0, "1 is no penalty")
        _number("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _number("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        if self.top_p == 0:
            raise ValueError("sampling: top_p is 0; it must be above")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63), 2**64 - 1)
        if len(stop) > MAX_STOP_STRINGS:
            raise ValueError(f"sampling: stop has {len(stop)}; it takes up to {MAX_STOP_STRINGS} strings")
        if not all(isinstance(text, str) and text for text in stop):
            raise ValueError(f"sampling: stop is {list(stop)!r}; it takes strings, none empty")
        for token in self.stop_token_ids:
            _whole("an entry of stop_token_ids", token, 0, None)
        if not isinstance(self.structured_outputs, (StructuredOutputs, type(None))):
            kind = type(self.structured_outputs).__name__
            raise ValueError(f"sampling: structured_outputs is a {kind}; it must be StructuredOutputs(...)")
        self._check_bias()

    def _take_numpy(self) -> None:
        """Numbers of NumPy's become Python's."""
        for one in fields(self):
            object.__setattr__(self, one.name, _plain(getattr(self, one.name)))
        ids = _tuple("stop_token_ids", self.stop_token_ids, "a list of token ids")
        object.__setattr__(self, "stop_token_ids", tuple(map(_plain, ids)))
        pairs = [tuple([_plain(one) for one in pair]) for pair in self.logit_bias]
        object.__setattr__(self, "logit_bias", tuple(pairs))

    def _check_bias(self) -> None:
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise ValueError(f"sampling: logit_bias has {len(self.logit_bias)} tokens; it takes up to {MAX_LOGIT_BIAS}")
        if self.min_tokens and len(self.stop_token_ids) > MAX_BIAS_ENTRIES // 4:
            raise ValueError(
                f"sampling: stop_token_ids has {len(self.stop_token_ids)} tokens; beside min_tokens it takes up to "
                f"{MAX_BIAS_ENTRIES // 4}"
            )
        for token, value in self.logit_bias:
            _whole("a token of logit_bias", token, 0, None)
            _number(f"logit_bias of token {token}", value, -1e6, 1e6)

    @property
    def is_plain_greedy(self) -> bool:
        """Whether each token is the most likely one, whatever came before, and nothing else is asked for."""
        changed = self.has_penalties or self.logit_bias or self.min_tokens or self.structured_outputs is not None
        return self.temperature == 0 and self.logprobs is None and not changed

    @property
    def has_penalties(self) -> bool:
        """Whether any penalty changes logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


def _plain(value: Any) -> Any:
    """NumPy's numbers as Python's. What a JSON request has is as it should be, without torch."""
    if type(value) in (type(None), bool, int, float, str, tuple, StructuredOutputs):  # not NumPy's subclasses
        return value
    from flashkernel.core.argument_types import plain_number

    return plain_number(value)


def _tuple(name: str, value: Any, what: str) -> tuple[Any, ...]:
    try:
        return () if value is None else tuple(value)
    except TypeError:
        raise ValueError(f"sampling: {name} is {value!r}; it must be {what}") from None


def _whole(name: str, value: object, least: int, most: int | None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
        bounds = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"sampling: {name} is {value!r}; it must be a whole number, {bounds}")


def _number(name: str, value: object, least: float, most: float, hint: str = "") -> None:
    fits = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not fits or not least <= value <= most:  # type: ignore[operator]
        more = f"; {hint}" if hint else ""
        raise ValueError(f"sampling: {name} is {value!r}; it must be a number from {least:g} to {most:g}{more}")
