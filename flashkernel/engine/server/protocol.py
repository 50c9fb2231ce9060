"""Requests of OpenAI's API, checked and turned into prompts and sampling parameters.

A field that would change the result and is not supported is refused. Others that are not known are ignored, with a
warning in the log.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flashkernel.engine.sampling_params import MAX_N, SamplingParams, StructuredOutputs
from flashkernel.engine.server import output_parsers
from flashkernel.engine.server.errors import ApiError, bad_request
from flashkernel.engine.server.output_parsers import OutputParser
from flashkernel.engine.tokenizer import Tokenizer

Element = TypeVar("Element")
ListOf = Annotated[list[Element], Field(fail_fast=True)]  # one wrong item says enough
Prompt = str | list[int]
log = logging.getLogger("flashkernel.server")

DEFAULT_COMPLETION_TOKENS = 16  # as OpenAI's
SHOWN = 80  # characters of a wrong value in a message
MAX_WARNINGS = 10  # lines that one request may write into the log
RESERVED_VARIABLES = {"messages", "self"}  # of chat templates
NO_EFFECT = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "verbosity",
}  # fmt: skip
# what cannot be served -> values that ask for nothing
REFUSED: dict[str, tuple[Any, ...]] = {
    "suffix": ("",), "functions": ([],), "function_call": ("none", "auto"),
    "modalities": (["text"],), "audio": (), "web_search_options": (), "previous_response_id": (),
    "background": (False,), "conversation": (),
    # vLLM's
    "guided_json": (), "guided_regex": (), "guided_choice": (), "guided_grammar": (), "structured_outputs": (),
    "bad_words": ([],), "allowed_token_ids": (), "include_stop_str_in_output": (False,), "use_beam_search": (False,),
    "truncate_prompt_tokens": (), "prompt_embeds": (), "return_tokens_as_token_ids": (False,), "chat_template": (),
    "continue_final_message": (False,), "add_generation_prompt": (True,),
}  # fmt: skip


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class StreamOptions(_Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding against eavesdroppers; has no effect


class JsonSchema(_Strict):
    json_schema: dict[str, Any] = Field(alias="schema")
    name: str | None = None
    strict: bool | None = None


class ResponseFormat(_Strict):
    """What the text must match; `regex` is an extension."""

    type: Literal["text", "json_object", "json_schema", "regex"]
    json_schema: JsonSchema | None = None
    regex: str | None = None

    def structured(self) -> StructuredOutputs | None:
        """What the sampler is told."""
        if self.type == "json_schema":
            if self.json_schema is None:
                raise bad_request("response_format has the type json_schema and no json_schema", "response_format")
            return StructuredOutputs(json_schema=json.dumps(self.json_schema.json_schema))
        if self.type == "regex":
            if self.regex is None:
                raise bad_request("response_format has the type regex and no regex", "response_format")
            return StructuredOutputs(regex=self.regex)
        return StructuredOutputs(json_object=True) if self.type == "json_object" else None


class ApiRequest(_Strict):
    """A request to any endpoint."""

    model: str | None = None  # None: the one that is served

    def check(self) -> None:
        """Raises ApiError for fields that are not supported; warns of those that are not known."""
        unknown = self.unknown_options()
        for name, value in (self.model_extra or {}).items():
            if value is None or name in NO_EFFECT:
                continue
            if name not in REFUSED:
                unknown.append(name)
                continue
            if not any(value == one and type(value) is type(one) for one in REFUSED[name]):
                raise bad_request(f"{name} is {_shown(value)}; this server cannot do that. Leave it out", name)
        for name in unknown[:MAX_WARNINGS]:
            log.warning("%r is no field of this request; it is ignored", name[:SHOWN])

    def unknown_options(self) -> list[str]:
        """Names of unknown fields inside other fields."""
        return []


class GenerationRequest(ApiRequest):
    """Fields of all endpoints that generate. Those from `top_k` on are vLLM's, not OpenAI's; clients send them as
    `extra_body`."""

    model: str
    n: int | None = None
    logit_bias: dict[str, float] | None = None
    response_format: ResponseFormat | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | ListOf[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    stop_token_ids: ListOf[int] | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None

    @property
    def num_prompts(self) -> int:
        """How many prompts there are."""
        return 1

    @property
    def choices_per_prompt(self) -> int:
        """`n`."""
        return 1 if self.n is None else self.n

    @property
    def num_choices(self) -> int:
        """How many texts are asked for."""
        return self.num_prompts * self.choices_per_prompt

    @property
    def streaming(self) -> bool:
        """Whether the text is sent as it is generated."""
        return bool(self.stream)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check(self) -> None:
        super().check()
        if self.n is not None and not 1 <= self.n <= MAX_N:
            raise bad_request(f"n is {self.n}; it must be a whole number, from 1 to {MAX_N}", "n")
        if self.prompt_logprobs is not None and self.streaming:
            raise bad_request("prompt_logprobs come with whole responses; set stream to false", "prompt_logprobs")
        if self.stream_options is not None and not self.streaming:
            raise bad_request("stream_options are for streams; set stream to true, or leave them out", "stream_options")

    def unknown_options(self) -> list[str]:
        extra = {} if self.stream_options is None else self.stream_options.model_extra or {}
        return [f"stream_options.{name}" for name, value in extra.items() if value]

    def sampling_params(self) -> SamplingParams:
        """The sampling parameters; ApiError if a value is out of its range."""
        given: dict[str, Any] = {
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p, "seed": self.seed, "stop": self.stop,
            "repetition_penalty": self.repetition_penalty, "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty, "stop_token_ids": self.stop_token_ids,
            "ignore_eos": self.ignore_eos, "logprobs": self.num_logprobs(), "min_tokens": self.min_tokens,
            "logit_bias": self._logit_bias(), "structured_outputs": self.structured_outputs(),
            "skip_special_tokens": self.skip_special_tokens, "prompt_logprobs": self.num_prompt_logprobs(),
        }  # fmt: skip
        try:
            return SamplingParams(
                max_tokens=self.token_limit(), **{name: value for name, value in given.items() if value is not None}
            )
        except ValueError as error:
            text = str(error)
            named = [name for name in (*given, "max_tokens") if text.startswith(f"sampling: {name} ")]
            raise bad_request(text.removeprefix("sampling: "), named[0] if named else None) from None

    def _logit_bias(self) -> dict[int, float] | None:
        if self.logit_bias is None:
            return None
        known = re.compile("[0-9]{1,18}")
        wrong = next((token for token in self.logit_bias if not known.fullmatch(token)), None)
        if wrong is not None:
            raise bad_request(f"logit_bias has {wrong[:SHOWN]!r}; its keys are token ids", "logit_bias")
        return {int(token): value for token, value in self.logit_bias.items()}

    def structured_outputs(self) -> StructuredOutputs | None:
        """What the text must match."""
        return None if self.response_format is None else self.response_format.structured()

    def token_limit(self) -> int | None:
        """Most generated tokens; None: to the end of the context."""
        return self.max_tokens

    def num_logprobs(self) -> int | None:
        """`SamplingParams.logprobs`."""
        return None

    def num_prompt_logprobs(self) -> int | None:
        """`SamplingParams.prompt_logprobs`."""
        return self.prompt_logprobs

    def prompts(self, tokenizer: Tokenizer | None) -> Sequence[Prompt]:
        """The prompt of each choice; ValueError if it cannot be made."""
        raise NotImplementedError


class CompletionRequest(GenerationRequest):
    prompt: str | ListOf[int] | ListOf[str] | ListOf[ListOf[int]]
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None

    def check(self) -> None:
        super().check()
        if self.best_of not in (None, self.n or 1):  # equal numbers choose nothing
            raise bad_request(f"best_of is {self.best_of}; this server cannot do that. Leave it out", "best_of")

    @property
    def generates(self) -> bool:
        """Whether more than the prompt is asked for: `max_tokens` of 0 with `echo` is for its log probabilities."""
        return not (self.echo and self.max_tokens == 0)

    def token_limit(self) -> int | None:
        if not self.generates:
            return 1  # a step samples a token, which is left out
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    def num_logprobs(self) -> int | None:
        return self.logprobs

    def num_prompt_logprobs(self) -> int | None:
        asked = [count for count in (self.prompt_logprobs, self.logprobs if self.echo else None) if count is not None]
        return max(asked, default=None)

    @property
    def num_prompts(self) -> int:
        return len(self.prompt) if self._several else 1

    @property
    def _several(self) -> bool:
        return isinstance(self.prompt, list) and bool(self.prompt) and not isinstance(self.prompt[0], int)

    def prompts(self, tokenizer: Tokenizer | None) -> Sequence[Prompt]:
        return self.prompt if self._several else [self.prompt]  # type: ignore[return-value, list-item]


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class ChatMessage(_Strict):
    role: str
    content: str | ListOf[TextPart] | None = None

    def as_dict(self) -> dict[str, Any]:
        """The message for a chat template: the content is one string."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        found = {**(self.model_extra or {}), "role": self.role, "content": text}
        calls = found.get("tool_calls")
        if isinstance(calls, list):
            found["tool_calls"] = [_with_arguments(call) for call in calls]
        return found


def _with_arguments(call: Any) -> Any:
    """A tool call for a template: its arguments are an object, where clients send JSON."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    except ValueError:
        return call


class Function(_Strict):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(_Strict):
    type: Literal["function"]
    function: Function


class ToolName(_Strict):
    name: str


class NamedTool(_Strict):
    type: Literal["function"]
    function: ToolName


class ChatRequest(GenerationRequest):
    messages: ListOf[ChatMessage]
    tools: ListOf[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs are given and logprobs is not true; set it, or leave them out", "logprobs")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise bad_request("max_tokens and max_completion_tokens are the same; give one of them", "max_tokens")
        taken = RESERVED_VARIABLES & (self.chat_template_kwargs or {}).keys()
        if taken:
            raise bad_request(
                f"chat_template_kwargs has {min(taken)!r}, which is not for clients to set; leave it out",
                "chat_template_kwargs",
            )
        forced = self.tool_choice not in (None, "none", "auto")
        if forced and self._forced_tools() is None:
            raise bad_request("tool_choice asks for a tool that `tools` does not have", "tool_choice")
        if forced and self.structured_format is not None:
            raise bad_request("tool_choice and response_format ask for different texts; give one", "tool_choice")

    @property
    def structured_format(self) -> StructuredOutputs | None:
        """What `response_format` asks for."""
        return super().structured_outputs()

    def _forced_tools(self) -> list[Function] | None:
        """The tools of which one must be called; None if there is no such tool."""
        known = [tool.function for tool in self.tools or []]
        if isinstance(self.tool_choice, NamedTool):
            wanted = self.tool_choice.function.name
            known = [function for function in known if function.name == wanted]
        return known or None

    def structured_outputs(self) -> StructuredOutputs | None:
        if self.tool_choice in (None, "none", "auto"):
            return self.structured_format
        forced = self._forced_tools() or []
        if isinstance(self.tool_choice, NamedTool):
            return StructuredOutputs(json_schema=json.dumps(forced[0].parameters or {"type": "object"}))
        tools = [function.model_dump(include={"name", "parameters"}) for function in forced]
        return StructuredOutputs(
            json_schema=output_parsers.required_schema(tools, self.parallel_tool_calls is not False)
        )

    def parser(self, template: str | None) -> OutputParser:
        """What the text is taken apart by."""
        if isinstance(self.tool_choice, NamedTool):
            return output_parsers.NamedCall(self.tool_choice.function.name)
        if self.tool_choice == "required":
            return output_parsers.RequiredCalls()
        found = output_parsers.parser_for(template, bool(self.tools) and self.tool_choice != "none")
        return output_parsers.SingleCall(found) if self.parallel_tool_calls is False else found

    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def prompts(self, tokenizer: Tokenizer | None) -> Sequence[Prompt]:
        if tokenizer is None:
            raise ValueError("the model came without a tokenizer, so it cannot chat; complete lists of tokens instead")
        self._check_tools(tokenizer)
        return [tokenizer.encode(self.rendered(tokenizer), add_special_tokens=False)]

    def rendered(self, tokenizer: Tokenizer, *, add_generation_prompt: bool = True) -> str:
        """The conversation as the model's template writes it; ValueError if it does not take it."""
        variables = {"add_generation_prompt": add_generation_prompt, **self._variables()}
        return tokenizer.render_chat(self._conversation(tokenizer.chat_template), **variables)

    def _conversation(self, template: str | None) -> list[dict[str, Any]]:
        """The messages for a template. OpenAI's later name of the system's role is unknown to most, and they would drop
        such a message."""
        found = [message.as_dict() for message in self.messages]
        for message in found:
            if message["role"] == "developer" and "developer" not in (template or ""):
                message["role"] = "system"
        return found

    def _check_tools(self, tokenizer: Tokenizer) -> None:
        """Raises ApiError for tools that the model would never hear of. Calls that are forced do not need its help."""
        optional = bool(self.tools) and self.tool_choice in (None, "auto")
        if optional and tokenizer.chat_template is not None and "tools" not in tokenizer.template_variables:
            raise bad_request(
                "the model's chat template has no tools, so it would not know of them; set tool_choice to "
                '"required" or to the name of a tool, which forces a call, or serve a model that knows tools',
                "tools",
            )

    def _variables(self) -> dict[str, Any]:
        """What the template is given beside the messages."""
        found: dict[str, Any] = {}
        if self.tools and self.tool_choice != "none":
            found["tools"] = [tool.model_dump(exclude_none=True) for tool in self.tools]
        if self.reasoning_effort is not None:
            found["reasoning_effort"] = self.reasoning_effort
        return {**found, **(self.chat_template_kwargs or {})}


Kind = TypeVar("Kind", bound=ApiRequest)


def parse(kind: type[Kind], body: bytes) -> Kind:
    """Parses a request; ApiError if it is none."""
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error) from None
    request.check()
    return request


def _refusal(error: ValidationError) -> ApiError:
    """Names the first wrong field, and what each type it may have says."""
    errors = error.errors(include_url=False)
    first = errors[0]
    if first["type"] == "json_invalid":
        return bad_request(f"the request is no JSON: {first['msg'].removeprefix('Invalid JSON: ')}")
    if not first["loc"]:
        return bad_request("the request must be a JSON object")
    name = str(first["loc"][0])
    if first["type"] == "missing" and len(first["loc"]) == 1:
        return bad_request(f"{name} is missing", name)
    reasons = dict.fromkeys(
        f"{_field_path(one['loc'])} is {_shown(one['input'])}: {one['msg'][0].lower()}{one['msg'][1:]}"
        for one in errors
        if one["loc"][0] == first["loc"][0]
    )
    return bad_request("; or ".join(reasons), name)


def _field_path(location: tuple[int | str, ...]) -> str:
    """`messages[0].role`, without the names that pydantic gives to the kinds of a union."""
    named = ""
    for number, part in enumerate(location):
        if isinstance(part, int):
            named += f"[{part}]"
        elif not number:
            named = part
        elif part.isidentifier() and part.islower() and part not in ("str", "int", "float", "bool"):
            named += f".{part}"
    return named


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."
