"""Text to token ids and back, and chat templates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

WORD_START = "\N{LOWER ONE EIGHTH BLOCK}"  # a space in SentencePiece's tokens
Message = Mapping[str, Any]  # {"role": "user", "content": "..."}


class Tokenizer:
    """A `tokenizers` tokenizer with the chat template that came with the model.

    Args:
        backend: The `tokenizers.Tokenizer`.
        chat_template: The model's Jinja template; None if it has none.
        special_tokens: Names that templates use, such as {"eos_token": "<|end|>"}.
        bos_token_id: Put before every text that `encode` is given; None if the backend does it or the model has none.

    Example:
        >>> import tokenizers
        >>> from flashkernel.engine import Tokenizer
        >>> backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "sea": 1, "wind": 2}, "[UNK]"))
        >>> backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        >>> tokenizer = Tokenizer(backend, chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
        >>> tokenizer.encode("wind sea")
        [2, 1]
        >>> tokenizer.apply_chat_template([{"role": "user", "content": "sea"}])
        [1]
    """

    def __init__(
        self,
        backend: Backend,
        *,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        bos_token_id: int | None = None,
    ) -> None:
        self.backend, self.chat_template = backend, chat_template
        self.special_tokens, self.bos_token_id = dict(special_tokens or {}), bos_token_id
        self._token_texts: dict[int, str] = {}

    @classmethod
    def from_folder(cls, path: Path) -> Tokenizer | None:
        """The tokenizer of the model folder `path`; None if there is no tokenizer.json.

        Args:
            path: The folder of a model.
        """
        file = path / "tokenizer.json"
        if not file.exists():
            return None
        try:
            backend = Backend.from_str(file.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises nothing more specific
            raise ValueError(f"{file}: it is no tokenizer ({error}); get it again") from error
        settings = path / "tokenizer_config.json"
        try:
            values = json.loads(settings.read_text(encoding="utf-8")) if settings.exists() else {}
        except ValueError as error:
            raise ValueError(f"{settings}: it cannot be read ({error})") from error
        special = {name: _content(value) for name, value in values.items() if name.endswith("_token")}
        return cls(
            backend,
            chat_template=_chat_template(path, values),
            special_tokens={name: value for name, value in special.items() if isinstance(value, str)},
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; `add_special_tokens` adds those that the model wants around every text.

        Args:
            text: What is encoded.
            add_special_tokens: Whether tokens such as <s> are added, which the model wants around every text.
        """
        try:
            token_ids = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:
            if isinstance(text, str):
                raise ValueError(
                    "the text has a lone surrogate, which UTF-8 cannot encode; read it without surrogateescape"
                ) from None
            raise
        if add_special_tokens and self.bos_token_id is not None and token_ids[:1] != [self.bos_token_id]:
            token_ids = [self.bos_token_id, *token_ids]
        return token_ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`, without special tokens if `skip_special_tokens`.

        Args:
            token_ids: What is decoded.
            skip_special_tokens: Whether special tokens give no text.
        """
        try:
            return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        except OverflowError:  # of the library's unsigned integers
            wrong = next(token for token in token_ids if not 0 <= token < 2**32)
            raise ValueError(f"token {wrong} is not in the vocabulary") from None

    @property
    def template_variables(self) -> frozenset[str]:
        """Names that the chat template reads, such as "tools"; none if it cannot be parsed."""
        return _template_variables(self.chat_template or "")

    def prepare_chat_template(self) -> None:
        """Compiles the chat template before the first conversation; `render_chat` says if it is wrong."""
        import jinja2

        with suppress(jinja2.TemplateError):
            _compiled_template(self.chat_template or "")

    def token_text(self, token_id: int) -> str:
        """The text that the token `token_id` adds to others; half a character becomes a replacement mark.

        Args:
            token_id: One token.
        """
        text = self._token_texts.get(token_id)
        if text is None:  # a response with log probabilities asks for the same ones again and again
            piece = self.backend.id_to_token(token_id)
            if piece is not None and piece.startswith(WORD_START):  # the decoder strips a space before the first token
                text = piece.replace(WORD_START, " ")
            else:
                text = self.backend.decode([token_id], skip_special_tokens=False)
            self._token_texts[token_id] = text
        return text

    def apply_chat_template(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Token ids of the conversation `messages`, by the model's template; with `add_generation_prompt` up to where
        the reply begins.

        `variables` are further names that some templates take (tools, enable_thinking).

        Args:
            messages: The conversation: dicts with "role" and "content".
            add_generation_prompt: Whether the head of the reply is added.
            variables: Further names that some templates take, such as tools and enable_thinking.
        """
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt, **variables)
        return self.encode(text, add_special_tokens=False)

    def render_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """The text that `apply_chat_template` encodes, with its `messages`, `add_generation_prompt` and `variables`.

        Args:
            messages: As for `apply_chat_template`.
            add_generation_prompt: As for `apply_chat_template`.
            variables: As for `apply_chat_template`.
        """
        check_messages(messages)
        if self.chat_template is None:
            raise ValueError("chat: the model came without a chat template; complete plain text with generate instead")
        import jinja2

        try:
            return _compiled_template(self.chat_template).render(
                messages=list(map(_with_text, messages)), add_generation_prompt=add_generation_prompt,
                **{**self.special_tokens, **variables},
            )  # fmt: skip
        except (jinja2.TemplateError, TypeError, AttributeError, LookupError) as error:  # it expects other messages
            raise ValueError(f"chat: the model's template does not take this conversation: {error}") from error


def check_messages(messages: Sequence[Message]) -> None:
    """Raises ValueError if this is no conversation."""
    if not messages or isinstance(messages, (str, Mapping)):
        raise ValueError("chat: a conversation is a list of messages, at least one")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f'chat: {message!r} is no message; one looks like {{"role": "user", "content": "Hello"}}')


def _with_text(message: Message) -> dict[str, Any]:
    """A message for a template: content that is given in parts of text becomes one text, as templates expect it."""
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(
                f'chat: a message has the part {part!r}; text is known, as {{"type": "text", "text": "Hello"}}'
            )
    return {**message, "content": "".join(part["text"] for part in content)}


def _content(value: Any) -> Any:
    return value.get("content") if isinstance(value, dict) else value


def _chat_template(path: Path, values: Mapping[str, Any]) -> str | None:
    """The chat template: from its own file, or from tokenizer_config.json, alone or as one of several by name."""
    file = path / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    found = values.get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found}
        return named.get("default")
    return found


@lru_cache(maxsize=32)
def _compiled_template(template: str) -> Any:
    """Compiled once: a large template takes tens of milliseconds, and is rendered for every conversation."""
    return _environment().from_string(template)


@lru_cache(maxsize=32)
def _template_variables(template: str) -> frozenset[str]:
    import jinja2
    from jinja2 import meta

    try:
        return frozenset(meta.find_undeclared_variables(_environment().parse(template)))
    except jinja2.TemplateError:  # render_chat says so
        return frozenset()


@cache
def _environment() -> Any:
    """A sandbox, because templates come with models, with the functions that Transformers offers them."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks an assistant's text for training; it is written like any other."""

        tags = {"generation"}  # noqa: RUF012 - as the base class has it

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def as_json(value: Any, **how: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **how})

    extensions: list[Any] = [loopcontrols, Generation]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = as_json
    environment.globals.update(raise_exception=refuse, strftime_now=lambda form: datetime.now().strftime(form))
    return environment
