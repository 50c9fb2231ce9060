"""Text to tokens and back: a `tokenizers` tokenizer with the chat template that came with the model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream

Message = Mapping[str, Any]  # {"role": "user", "content": "..."}


class Tokenizer:
    """Encodes, decodes and renders conversations."""

    def __init__(
        self,
        backend: Backend,
        *,
        template: str | None = None,
        special: Mapping[str, str] | None = None,
        first: int | None = None,
    ) -> None:
        """`special` are the names that templates use (bos_token, eos_token); `first` is put before every text."""
        self.backend, self.template, self.special, self.first = backend, template, dict(special or {}), first

    @classmethod
    def from_folder(cls, path: Path) -> Tokenizer | None:
        """The tokenizer of a model's folder; None where it has no tokenizer.json."""
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
            template=_template(path, values),
            special={name: value for name, value in special.items() if isinstance(value, str)},
        )

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Tokens of a text; `special` adds what the model wants before or after every text."""
        tokens = self.backend.encode(text, add_special_tokens=special).ids
        if special and self.first is not None and tokens[:1] != [self.first]:
            tokens = [self.first, *tokens]
        return tokens

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        return self.backend.decode(list(tokens), skip_special_tokens=skip_special)

    def token_text(self, token: int) -> str:
        """One token alone, for display; half a character becomes a replacement mark."""
        return self.backend.decode([token], skip_special_tokens=False)

    def chat(self, messages: Sequence[Message], *, add_reply: bool = True, **more: Any) -> list[int]:
        """Tokens of a conversation, by the model's template, up to where the reply begins."""
        return self.encode(self.render(messages, add_reply=add_reply, **more), special=False)

    def render(self, messages: Sequence[Message], *, add_reply: bool = True, **more: Any) -> str:
        """The text of a conversation; `more` are names that some templates take (tools, enable_thinking)."""
        check_messages(messages)
        if self.template is None:
            raise ValueError("chat: the model came without a chat template; complete plain text with generate instead")
        import jinja2

        try:
            return _environment().from_string(self.template).render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_reply, **{**self.special, **more},
            )  # fmt: skip
        except jinja2.TemplateError as error:
            raise ValueError(f"chat: the model's template does not take this conversation: {error}") from error


def check_messages(messages: Sequence[Message]) -> None:
    """ValueError where this is no conversation."""
    if not messages or isinstance(messages, (str, Mapping)):
        raise ValueError("chat: a conversation is a list of messages, at least one")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f'chat: {message!r} is no message; one looks like {{"role": "user", "content": "Hello"}}')


class TextStream:
    """The text of a growing list of tokens, piece by piece, watching for stop strings.

    A piece that may turn out to begin a stop string is held back until it is known.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], skip_special: bool) -> None:
        self._tokenizer, self._stops, self._skip = tokenizer, stops, skip_special
        self._stream = DecodeStream(skip_special_tokens=skip_special)
        self._tokens: list[int] = []
        self.text = ""  # everything up to a stop string
        self.stopped = False
        self._given = 0  # characters that were handed out

    def push(self, token: int, *, now: bool = True) -> None:
        """One more token; `stopped` says whether it completed a stop string, which is cut off.

        `now=False` leaves its text to `close`, which must be done for all tokens or none.
        """
        self._tokens.append(token)
        if not now:
            return
        piece = self._stream.step(self._tokenizer.backend, token)
        if piece:
            self._extend(piece)

    def close(self) -> None:
        """No token comes any more: half a character at the end becomes a replacement mark."""
        if not self.stopped:
            whole = self._tokenizer.decode(self._tokens, skip_special=self._skip)
            if len(whole) > len(self.text) and whole.startswith(self.text):
                self._extend(whole[len(self.text) :])

    def take(self, final: bool = False) -> str:
        """What can be shown and was not yet."""
        end = len(self.text) if final or self.stopped else len(self.text) - self._held()
        piece = self.text[self._given : end]
        self._given = max(self._given, end)
        return piece

    def _extend(self, piece: str) -> None:
        longest = max((len(stop) for stop in self._stops), default=1)
        start = max(0, len(self.text) - longest + 1)
        self.text += piece
        found = [place for place in (self.text.find(stop, start) for stop in self._stops) if place >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.stopped = True

    def _held(self) -> int:
        """How many characters at the end might be the beginning of a stop string."""
        for size in range(max((len(stop) for stop in self._stops), default=1) - 1, 0, -1):
            if any(len(stop) > size and self.text.endswith(stop[:size]) for stop in self._stops):
                return size
        return 0


def _content(value: Any) -> Any:
    return value.get("content") if isinstance(value, dict) else value


def _template(path: Path, values: Mapping[str, Any]) -> str | None:
    """The chat template: in a file of its own, or among the settings, alone or with a name."""
    file = path / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    found = values.get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found}
        return named.get("default")
    return found


def _environment() -> Any:
    """Templates come with models: they run in a sandbox, and have what Transformers gives them."""
    import jinja2
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def as_json(value: Any, **how: Any) -> str:
        return json.dumps(value, ensure_ascii=False, **how)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = as_json
    environment.globals.update(raise_exception=refuse, strftime_now=lambda form: datetime.now().strftime(form))
    return environment
