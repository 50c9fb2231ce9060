"""The input processor: checks a request and makes the `Sequence` of it that the scheduler takes."""

from __future__ import annotations

import collections.abc

import numpy as np

from flashkernel.engine.config import ModelConfig
from flashkernel.engine.detokenizer import IncrementalDetokenizer
from flashkernel.engine.grammar import Grammar, GrammarCompiler, GrammarError
from flashkernel.engine.prompt_lookup import PromptLookup
from flashkernel.engine.sampling_params import SamplingParams
from flashkernel.engine.sequence import Sequence
from flashkernel.engine.tokenizer import Tokenizer


class RequestError(ValueError):
    """A request that cannot be served; the message says why. Other requests are not affected.

    Example:
        >>> from flashkernel.engine import LLM, RequestError
        >>> from flashkernel.engine.dummy_weights import tiny_transformer
        >>> try:
        ...     LLM(tiny_transformer(), kv_cache_tokens=64).generate([[999]])
        ... except RequestError as error:
        ...     print(error)
        token 999 is not in the vocabulary, which has 0 to 99
    """


class PromptTooLong(RequestError):
    """A prompt of `count` tokens that leaves none of `max_model_len` to generate."""

    def __init__(self, count: int, max_model_len: int) -> None:
        super().__init__(
            f"the prompt has {count} tokens; max_model_len is {max_model_len}, and one must be left "
            "to generate. Shorten the prompt, or give the engine a larger max_model_len"
        )
        self.count, self.max_model_len = count, max_model_len


class InputProcessor:
    """Makes sequences of requests. Any thread may use it.

    Args:
        tokenizer: None takes prompts as token ids only.
        config: The model's.
        max_model_len: Most tokens of a sequence, prompt and output together.
        drafts: Greedy sequences are decoded with drafts by prompt look-up.
    """

    def __init__(self, tokenizer: Tokenizer | None, config: ModelConfig, max_model_len: int, drafts: bool) -> None:
        self._tokenizer, self._max_model_len, self._drafts = tokenizer, max_model_len, drafts
        self._vocab_size, self._eos_token_ids = config.vocab_size, frozenset(config.eos_token_ids)
        self.grammars: GrammarCompiler | None = None
        if tokenizer is not None:
            self.grammars = GrammarCompiler(tokenizer, config.vocab_size, config.eos_token_ids)

    def prepare_grammars(self) -> None:
        """Makes what structured outputs share; RequestError if the library does not take the model's tokenizer."""
        if self.grammars is not None:
            try:
                self.grammars.prepare()
            except GrammarError as error:
                raise RequestError(str(error)) from error

    def process(
        self, request_id: str, prompt: str | collections.abc.Sequence[int], params: SamplingParams, streaming: bool
    ) -> Sequence:
        """The sequence of a request.

        Args:
            request_id: Its id.
            prompt: A text, or token ids.
            params: Sampling parameters.
            streaming: Whether it has an output for every token.

        Raises:
            RequestError: It can never be served.
            TypeError: The prompt is neither text nor token ids.
        """
        token_ids = self._encode(prompt)
        self._check(token_ids, params)
        most = self._max_model_len
        detokenizer = None
        if self._tokenizer is not None:
            detokenizer = IncrementalDetokenizer(self._tokenizer, params.stop, params.skip_special_tokens)
        return Sequence(
            request_id,
            prompt if isinstance(prompt, str) else None,
            token_ids,
            params,
            most if params.max_tokens is None else min(most, len(token_ids) + params.max_tokens),
            streaming,
            detokenizer,
            self._grammar(params),
            PromptLookup() if self._drafts and params.is_plain_greedy else None,
            end_token_ids=self._end_token_ids(params),
        )

    def _encode(self, prompt: str | collections.abc.Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise RequestError("the model came without a tokenizer; give prompts as lists of token ids")
            try:
                prompt = self._tokenizer.encode(prompt)  # it may know tokens that the model does not have
            except ValueError as error:
                raise RequestError(str(error)) from error
        if isinstance(prompt, (bytes, bytearray, memoryview)):
            raise TypeError(f"a prompt is text (str) or a list of token ids, not {type(prompt).__name__}")
        try:
            token_ids = np.asarray(prompt)
        except ValueError:  # lists of different lengths
            raise RequestError("a prompt is text (str) or a list of token ids, not a list with lists in it") from None
        if token_ids.size == 0:
            return []
        if token_ids.ndim != 1 or token_ids.dtype.kind not in "iu":
            raise RequestError(
                f"a prompt is text (str) or a list of token ids, not {token_ids.ndim}-dim {token_ids.dtype}"
            )
        vocab_size = self._vocab_size
        if int(token_ids.min()) < 0 or int(token_ids.max()) >= vocab_size:
            wrong = token_ids[(token_ids < 0) | (token_ids >= vocab_size)][0]
            raise RequestError(f"token {wrong} is not in the vocabulary, which has 0 to {vocab_size - 1}")
        return token_ids.tolist()  # type: ignore[no-any-return]

    def _check(self, token_ids: list[int], params: SamplingParams) -> None:
        if not token_ids:
            raise RequestError("the prompt is empty; it takes at least one token to go on from")
        if len(token_ids) >= self._max_model_len:
            raise PromptTooLong(len(token_ids), self._max_model_len)
        if params.stop and self._tokenizer is None:
            raise RequestError("stop strings need text, and the model came without a tokenizer; use stop_token_ids")
        if params.structured_outputs is not None and self._tokenizer is None:
            raise RequestError("structured outputs need text, and the model came without a tokenizer")
        if params.n != 1:
            raise RequestError(f"a request of the engine has one completion, not {params.n}; add it {params.n} times")
        vocab_size = self._vocab_size
        wrong = [token for token, _ in params.logit_bias if token >= vocab_size]
        if wrong:
            raise RequestError(f"logit_bias names token {wrong[0]}; the vocabulary has 0 to {vocab_size - 1}")
        most = max(params.logprobs or 0, params.prompt_logprobs or 0)
        if most > vocab_size:
            raise RequestError(f"{most} logprobs are more than the vocabulary has")

    def _grammar(self, params: SamplingParams) -> Grammar | None:
        if params.structured_outputs is None:
            return None
        assert self.grammars is not None
        try:
            return self.grammars.compile(params.structured_outputs)
        except GrammarError as error:
            raise RequestError(str(error)) from error

    def _end_token_ids(self, params: SamplingParams) -> frozenset[int]:
        """Tokens that end a text."""
        own = frozenset() if params.ignore_eos else self._eos_token_ids
        return own.union(params.stop_token_ids) if params.stop_token_ids else own
