"""Structured outputs: which tokens may come next, by llguidance (`pip install 'flashkernel[grammar]'`).

A mask depends on the token before it. So a sequence with a grammar decodes only when the host has read its last token;
other sequences of the batch are not held up.
"""

from __future__ import annotations

import importlib.util
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np

from flashkernel.engine.sampling_params import StructuredOutputs
from flashkernel.engine.tokenizer import Tokenizer


class GrammarError(ValueError):
    """A grammar that cannot be used; the message says why."""


class Grammar:
    """The state of one sequence in its grammar."""

    def __init__(self, matcher: Any, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._matcher, self._eos = matcher, eos_token_ids
        self._num_words = -(-vocab_size // 32)
        self._allowed: np.ndarray | None = None  # after the tokens so far; None: not computed yet
        self.finished = False

    def allowed_tokens(self) -> np.ndarray:
        """int32 words; bit t % 32 of word t // 32 is set if token t may come next."""
        if self._allowed is None:
            self._allowed = self._compute_allowed()
        return self._allowed

    def _compute_allowed(self) -> np.ndarray:
        from llguidance.numpy import fill_next_token_bitmask

        words = np.zeros((1, self._num_words), dtype=np.int32)
        if self.finished:
            for token in self._eos:
                words[0, token // 32] |= np.uint32(1 << (token % 32)).astype(np.int32)
        else:
            fill_next_token_bitmask(self._matcher, words)
        return words[0]

    def advance(self, token_id: int) -> None:
        """Takes a token that was sampled; `finished` says whether the text is complete.

        GrammarError if the grammar cannot go on: it has reached a limit of the library's.
        """
        self._allowed = None
        if not self.finished:
            self._matcher.consume_token(token_id)
            if self._matcher.is_error():
                reason = self._matcher.get_error().strip().splitlines()[0]  # the library's whole state follows
                raise GrammarError(f"the grammar failed in the middle of the text: {reason}")
            self.finished = bool(self._matcher.is_stopped())


class GrammarCompiler:
    """Makes grammars for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._vocab_size, self._eos = vocab_size, eos_token_ids
        self._tokenizer = tokenizer
        self._compiled: Any = None
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Makes what all grammars share, if the library is installed; GrammarError if it refuses the tokenizer.

        For a vocabulary of 128,000 tokens it takes a second, in which no other thread runs.
        """
        if importlib.util.find_spec("llguidance") is not None and self._eos:
            self._llguidance_tokenizer()

    def compile(self, wanted: StructuredOutputs) -> Grammar:
        """A grammar at its first token; GrammarError if the library is missing or refuses it."""
        try:
            from llguidance import LLMatcher
        except ImportError:
            raise GrammarError(
                "structured outputs need llguidance, which is not installed; run `pip install 'flashkernel[grammar]'`"
            ) from None
        if wanted.regex is not None:
            source = LLMatcher.grammar_from_regex(wanted.regex)
        else:
            schema = '{"type": "object"}' if wanted.json_schema is None else wanted.json_schema
            # One way to write JSON, as most do: a model that may add spaces may add them for ever.
            style: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
            try:
                source = LLMatcher.grammar_from_json_schema(schema, defaults=style)
            except ValueError as error:  # such as a schema that is true or NaN
                raise GrammarError(f"this JSON schema cannot be used: {error}") from error
        refusal = LLMatcher.validate_grammar(source, None)
        if refusal:
            raise GrammarError(f"this grammar cannot be used: {refusal.strip().splitlines()[0]}")
        matcher = LLMatcher(self._llguidance_tokenizer(), source)
        if matcher.is_error():
            raise GrammarError(f"this grammar cannot be used: {matcher.get_error().strip().splitlines()[0]}")
        grammar = Grammar(matcher, self._vocab_size, self._eos)
        grammar.allowed_tokens()
        if matcher.is_error() or (matcher.is_stopped() and not matcher.is_accepting()):
            raise GrammarError("this grammar cannot be used: it has no token that a text may begin with")
        return grammar

    def _llguidance_tokenizer(self) -> Any:
        """Made once, whichever request comes first."""
        with self._lock:
            if self._compiled is None:
                self._compiled = self._new_tokenizer()
        return self._compiled

    def _new_tokenizer(self) -> Any:
        """llguidance reads the tokenizer from a file."""
        import llguidance

        if not self._eos:
            raise GrammarError("structured outputs end with an end-of-sequence token, and the model names none")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "tokenizer.json")
            path.write_text(self._tokenizer.backend.to_str(), encoding="utf-8")
            try:
                return llguidance.LLTokenizer(str(path), n_vocab=self._vocab_size, eos_token=list(self._eos))
            except (ValueError, RuntimeError) as error:
                raise GrammarError(f"llguidance does not take this tokenizer: {error}") from error
