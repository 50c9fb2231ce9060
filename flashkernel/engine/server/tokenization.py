"""vLLM's /tokenize and /detokenize: what a text or a conversation is in tokens, and back."""

from __future__ import annotations

from typing import Any

from flashkernel.engine.server.errors import bad_request
from flashkernel.engine.server.protocol import ApiRequest, ChatMessage, ChatRequest, ListOf, Tool
from flashkernel.engine.server.served_model import ServedModel
from flashkernel.engine.tokenizer import Tokenizer


class TokenizeRequest(ApiRequest):
    """A text (`prompt`), or a conversation (`messages`), which the model's chat template renders."""

    prompt: str | None = None
    messages: ListOf[ChatMessage] | None = None
    add_special_tokens: bool | None = None  # by default to a text and not to a conversation, whose template has them
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    tools: ListOf[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        super().check()
        if (self.prompt is None) == (self.messages is None):
            raise bad_request("give either a prompt or messages", "prompt")

    def response(self, model: ServedModel) -> dict[str, Any]:
        """The tokens; ApiError if there can be none."""
        tokenizer = _tokenizer(model)
        try:
            token_ids = self._token_ids(model.name, tokenizer)
        except ValueError as error:
            raise bad_request(str(error)) from error
        texts = [tokenizer.backend.id_to_token(token) for token in token_ids] if self.return_token_strs else None
        return {"count": len(token_ids), "max_model_len": model.max_model_len, "tokens": token_ids, "token_strs": texts}

    def _token_ids(self, name: str, tokenizer: Tokenizer) -> list[int]:
        if self.prompt is not None:
            return tokenizer.encode(self.prompt, add_special_tokens=self.add_special_tokens is not False)
        chat = ChatRequest(
            model=name, messages=self.messages or [], tools=self.tools, chat_template_kwargs=self.chat_template_kwargs
        )
        chat.check()
        text = chat.rendered(tokenizer, add_generation_prompt=self.add_generation_prompt is not False)
        return tokenizer.encode(text, add_special_tokens=bool(self.add_special_tokens))


class DetokenizeRequest(ApiRequest):
    """Token ids."""

    tokens: ListOf[int]

    def response(self, model: ServedModel) -> dict[str, Any]:
        """The text of the tokens, special ones included; ApiError if a token is none."""
        tokenizer = _tokenizer(model)
        known = tokenizer.backend.id_to_token
        wrong = [token for token in self.tokens if not 0 <= token < 2**32 or known(token) is None]
        if wrong:
            raise bad_request(f"token {wrong[0]} is not in the vocabulary", "tokens")
        return {"prompt": tokenizer.decode(self.tokens, skip_special_tokens=False)}


def _tokenizer(model: ServedModel) -> Tokenizer:
    if model.tokenizer is None:
        raise bad_request("the model came without a tokenizer")
    return model.tokenizer
