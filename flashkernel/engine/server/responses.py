"""OpenAI's /v1/responses in its plain form: text in, text or calls of functions out, whole or as a stream of events.

Nothing is stored: a request has the whole conversation, and `previous_response_id` is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, PrivateAttr

from flashkernel.engine.outputs import RequestOutput, TokenLogprob
from flashkernel.engine.server.errors import bad_request
from flashkernel.engine.server.formatters import ChatFormatter, PromptLogprobs, encode_json
from flashkernel.engine.server.output_parsers import Parsed, ToolCall
from flashkernel.engine.server.protocol import (
    ChatMessage,
    ChatRequest,
    Function,
    JsonSchema,
    ListOf,
    NamedTool,
    ResponseFormat,
    Tool,
    ToolName,
    _Strict,
)

_ID_PREFIXES = {"message": "msg", "reasoning": "rs"}
_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}
_TEXT_PARTS = ("input_text", "output_text", "text")


class InputItem(_Strict):
    """A message, a call of a function, its result, or reasoning, which a model is not shown again."""

    type: str | None = None
    role: str | None = None
    content: str | list[dict[str, Any]] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[dict[str, Any]] | None = None

    def message(self) -> dict[str, Any] | None:
        """The item as a message of a chat; None for reasoning."""
        if self.type == "reasoning":
            return None
        if self.type == "function_call":
            function = {"name": self.name, "arguments": self.arguments}
            call = {"id": self.call_id, "type": "function", "function": function}
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        if self.type == "function_call_output":
            return {"role": "tool", "content": _text_of(self.output), "tool_call_id": self.call_id}
        if self.type not in (None, "message") or self.role is None:
            raise bad_request(
                f"input has an item of type {self.type!r}; messages and function calls are known", "input"
            )
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": _text_of(self.content)}


def _text_of(content: str | list[dict[str, Any]] | None) -> str:
    """The text of an item, which may be given in parts."""
    if not isinstance(content, list):
        return content or ""
    wrong = next((part.get("type") for part in content if part.get("type") not in _TEXT_PARTS), None)
    if wrong is not None:
        raise bad_request(f"input has a part of type {wrong!r}; text alone is known", "input")
    return "".join(str(part.get("text", "")) for part in content)


def _messages(items: Sequence[InputItem]) -> list[dict[str, Any]]:
    """Items as messages of a chat; what the assistant said and called in one turn is one message."""
    found: list[dict[str, Any]] = []
    for message in (item.message() for item in items):
        if message is None:
            continue
        if "tool_calls" in message and found and found[-1]["role"] == "assistant":
            found[-1].setdefault("tool_calls", []).extend(message["tool_calls"])
        else:
            found.append(message)
    return found


class FunctionTool(_Strict):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class FunctionName(_Strict):
    type: Literal["function"]
    name: str


class TextFormat(_Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    name: str | None = None


class TextOptions(_Strict):
    format: TextFormat | None = None


class Reasoning(_Strict):
    effort: str | None = None


class ResponsesRequest(ChatRequest):
    """A request of /v1/responses, turned into one of a chat."""

    messages: ListOf[ChatMessage] = Field(default_factory=list)
    input: str | ListOf[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    tools: ListOf[FunctionTool] | None = None  # type: ignore[assignment]
    tool_choice: Literal["none", "auto", "required"] | FunctionName | None = None  # type: ignore[assignment]
    _echoed: dict[str, Any] = PrivateAttr(default_factory=dict)

    @property
    def echoed(self) -> dict[str, Any]:
        """What a response says about its request."""
        return self._echoed

    def check(self) -> None:
        if self.n not in (None, 1):
            raise bad_request(f"n is {self.n}; /v1/responses gives one answer. Leave it out", "n")
        if self.prompt_logprobs is not None:
            raise bad_request("/v1/responses has no place for prompt_logprobs; leave them out", "prompt_logprobs")
        self._echoed = self._said()
        items = [InputItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        found = _messages(items)
        if self.instructions is not None:
            found.insert(0, {"role": "system", "content": self.instructions})
        self.messages = [ChatMessage(**message) for message in found]
        if self.max_output_tokens is not None:
            self.max_completion_tokens = self.max_output_tokens
        if self.reasoning is not None and self.reasoning.effort is not None:
            self.reasoning_effort = self.reasoning.effort
        if self.text is not None and self.text.format is not None:
            wanted = self.text.format
            if wanted.type == "json_schema" and wanted.json_schema is None:
                raise bad_request("text.format has the type json_schema and no schema", "text")
            schema = None if wanted.json_schema is None else JsonSchema(schema=wanted.json_schema)
            self.response_format = ResponseFormat(type=wanted.type, json_schema=schema)
        chat: Any = self
        if self.tools is not None:
            chat.tools = [
                Tool(type="function", function=Function(**tool.model_dump(exclude={"type"}))) for tool in self.tools
            ]
        if isinstance(self.tool_choice, FunctionName):
            chat.tool_choice = NamedTool(type="function", function=ToolName(name=self.tool_choice.name))
        super().check()

    def _said(self) -> dict[str, Any]:
        names = {"instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "reasoning", "temperature",
                 "text", "tool_choice", "tools", "top_p"}  # fmt: skip
        given = self.model_dump(include=names, by_alias=True, exclude_none=True)
        defaults: dict[str, Any] = {
            "instructions": None, "max_output_tokens": None, "metadata": {}, "parallel_tool_calls": True,
            "temperature": 1.0, "tool_choice": "auto", "tools": [], "top_p": 1.0,
        }  # fmt: skip
        return {**defaults, **given}

    @property
    def include_usage(self) -> bool:
        return True


class ResponsesFormatter(ChatFormatter):
    """Responses of /v1/responses: a list of output items (reasoning, a message, calls), in the order of the text."""

    prefix, response_object = "resp", "response"
    ends_with_done = False

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.echoed: dict[str, Any] = {}  # what the request said
        self._items: list[dict[str, Any]] = []  # the last one may be open
        self._is_open = False
        self._pieces: list[str] = []  # text of the open item
        self._delta_template: tuple[str, str, str] | None = None  # what stands around its number and its text
        self._sequence = 0

    def response(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        done = outputs[0].outputs[0]
        self._add(self._parser().whole(done.text))
        self._end()
        return self._response(done.finish_reason, outputs)

    def first_chunks(self, index: int, scores: PromptLogprobs | None = None) -> list[dict[str, Any]]:
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=self._response(None, ())) for kind in kinds]

    def events(self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None, reason: str | None) -> str:
        new = self._feed(index, text, reason)
        kind, more = ("reasoning", new.reasoning) if new.reasoning else ("message", new.content)
        goes_on = self._is_open and self._items[-1]["type"] == kind and not (new.reasoning and new.content)
        if goes_on and not new.tool_calls:
            return self._text_delta(more) if more else ""  # a parser may hold it back
        return "".join(map(self.event, self._add(new)))

    def _text_delta(self, text: str) -> str:
        """The event of text that the open item goes on with. All but its number and the text is encoded once."""
        if self._delta_template is None:
            number, mark = self._sequence, f"text of {self.id}"  # which nothing else in the event is
            wire = self.event(self._delta_event(mark))
            self._sequence = number
            before, _, rest = wire.partition(f'"sequence_number":{number}')
            between, _, after = rest.partition(encode_json(mark))
            self._delta_template = f'{before}"sequence_number":', between, after
        before, between, after = self._delta_template
        self._pieces.append(text)
        self._sequence += 1
        return f"{before}{self._sequence - 1}{between}{encode_json(text)}{after}"

    def last_chunks(self, outputs: Sequence[RequestOutput], include_usage: bool) -> list[dict[str, Any]]:
        events = self._end()
        response = self._response(outputs[0].outputs[0].finish_reason, outputs)
        return [*events, self._event(f"response.{response['status']}", response=response)]

    def _event(self, kind: str, **values: Any) -> dict[str, Any]:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1, **values}

    def _add(self, new: Parsed) -> list[dict[str, Any]]:
        """Adds new parts to the output items; returns the events of a stream."""
        events = []
        if new.reasoning:
            events += self._write("reasoning", new.reasoning)
        if new.content:
            events += self._write("message", new.content)
        for call in new.tool_calls:
            events += [*self._close(), *self._call(call)]
        return events

    def _end(self) -> list[dict[str, Any]]:
        """Closes the last item; an output without any has an empty message."""
        empty = [] if self._items else self._open("message")
        return [*empty, *self._close()]

    def _write(self, kind: str, text: str) -> list[dict[str, Any]]:
        """Appends text to the open item, or to a new one if that has another kind."""
        events = []
        if not self._is_open or self._items[-1]["type"] != kind:
            events += [*self._close(), *self._open(kind)]
        self._pieces.append(text)
        return [*events, self._delta_event(text)]

    def _delta_event(self, text: str) -> dict[str, Any]:
        """The event of new text of the open item."""
        kind = self._items[-1]["type"]
        more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        return self._event(f"response.{_PARTS[kind]}.delta", **self._place(), content_index=0, delta=text, **more)

    def _open(self, kind: str) -> list[dict[str, Any]]:
        number = len(self._items)
        item: dict[str, Any] = {"id": f"{_ID_PREFIXES[kind]}_{number}_{self.id}", "type": kind, "status": "in_progress"}
        content: dict[str, Any] = {"type": _PARTS[kind], "text": ""}
        if kind == "message":
            item["role"], content["annotations"] = "assistant", []
        else:
            item["summary"] = []
        self._items.append({**item, "content": [content]})
        self._is_open, self._pieces, self._delta_template = True, [], None
        return [
            self._event("response.output_item.added", output_index=number, item={**item, "content": []}),
            self._event("response.content_part.added", **self._place(), content_index=0, part=dict(content)),
        ]

    def _close(self) -> list[dict[str, Any]]:
        if not self._is_open:
            return []
        self._is_open = False
        item = self._items[-1]
        (content,) = item["content"]
        item["status"], content["text"] = "completed", "".join(self._pieces)
        more: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
        return [
            self._event(
                f"response.{content['type']}.done", **self._place(), content_index=0, text=content["text"], **more
            ),
            self._event("response.content_part.done", **self._place(), content_index=0, part=content),
            self._event("response.output_item.done", output_index=len(self._items) - 1, item=item),
        ]

    def _call(self, call: ToolCall) -> list[dict[str, Any]]:
        item = {"type": "function_call", "id": f"fc_{call.id}", "call_id": call.id, "name": call.name}
        self._items.append({**item, "arguments": call.arguments, "status": "completed"})
        number, place = len(self._items) - 1, self._place()
        begun = {**item, "arguments": "", "status": "in_progress"}
        return [
            self._event("response.output_item.added", output_index=number, item=begun),
            self._event("response.function_call_arguments.delta", **place, delta=call.arguments),
            self._event("response.function_call_arguments.done", **place, name=call.name, arguments=call.arguments),
            self._event("response.output_item.done", output_index=number, item=self._items[-1]),
        ]

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _response(self, reason: str | None, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        status = "in_progress" if reason is None else "incomplete" if reason == "length" else "completed"
        tokens = sum(len(done.outputs[0].token_ids) for done in outputs)
        prompt = sum(len(done.prompt_token_ids) for done in outputs)
        cached = sum(done.num_cached_tokens for done in outputs)
        usage = {
            "input_tokens": prompt, "input_tokens_details": {"cached_tokens": cached}, "output_tokens": tokens,
            "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": prompt + tokens,
        }  # fmt: skip
        return {
            "id": self.id, "object": "response", "created_at": self._created, "model": self._model, "status": status,
            "output": list(self._items), "error": None, **self.echoed, "usage": usage if outputs else None,
            "incomplete_details": {"reason": "max_output_tokens"} if reason == "length" else None,
        }  # fmt: skip
