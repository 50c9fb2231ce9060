"""OpenAI's /v1/responses in its plain form: text in, text or calls of functions out, whole or as a stream of events.

Nothing is stored: a request has the whole conversation, and `previous_response_id` is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from flashkernel.engine.outputs import RequestOutput, TokenLogprob
from flashkernel.engine.server.errors import bad_request
from flashkernel.engine.server.formatters import ChatFormatter
from flashkernel.engine.server.output_parsers import Parsed
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


class InputItem(_Strict):
    """A message, a call of a function, or its result."""

    type: str | None = None
    role: str | None = None
    content: str | list[dict[str, Any]] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | None = None

    def message(self) -> dict[str, Any]:
        """The item as a message of a chat."""
        if self.type == "function_call":
            function = {"name": self.name, "arguments": self.arguments}
            call = {"id": self.call_id, "type": "function", "function": function}
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        if self.type == "function_call_output":
            return {"role": "tool", "content": self.output or "", "tool_call_id": self.call_id}
        if self.type not in (None, "message") or self.role is None:
            raise bad_request(
                f"input has an item of type {self.type!r}; messages and function calls are known", "input"
            )
        parts = self.content if isinstance(self.content, list) else [{"type": "input_text", "text": self.content or ""}]
        for part in parts:
            if part.get("type") not in ("input_text", "output_text", "text"):
                raise bad_request(f"input has a part of type {part.get('type')!r}; text alone is known", "input")
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": "".join(str(part.get("text", "")) for part in parts)}


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

    def check(self) -> None:
        items = [InputItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        found = [item.message() for item in items]
        if self.instructions is not None:
            found.insert(0, {"role": "system", "content": self.instructions})
        self.messages = [ChatMessage(**message) for message in found]
        if self.max_output_tokens is not None:
            self.max_completion_tokens = self.max_output_tokens
        if self.reasoning is not None and self.reasoning.effort is not None:
            self.reasoning_effort = self.reasoning.effort
        if self.text is not None and self.text.format is not None:
            wanted = self.text.format
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

    @property
    def include_usage(self) -> bool:
        return True


class ResponsesFormatter(ChatFormatter):
    """Responses of /v1/responses."""

    prefix, response_object = "resp", "response"
    ends_with_done = False

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._parsed = Parsed()
        self._sequence = 0

    def response(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        done = outputs[0].outputs[0]
        return self._response(self._parser().whole(done.text), done.finish_reason, outputs)

    def first_chunks(self, index: int) -> list[dict[str, Any]]:
        item = {"id": f"msg_{self.id}", "type": "message", "role": "assistant", "status": "in_progress", "content": []}
        part = {"type": "output_text", "text": "", "annotations": []}
        return [
            self._event("response.created", response=self._response(Parsed(), None, ())),
            self._event("response.output_item.added", output_index=0, item=item),
            self._event("response.content_part.added", item_id=item["id"], output_index=0, content_index=0, part=part),
        ]

    def chunks(
        self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None, reason: str | None
    ) -> list[dict[str, Any]]:
        parser = self._parsers.setdefault(index, self._parser())
        new = parser.feed(text)
        if reason is not None:
            new.add(parser.finish())
        self._parsed.add(new)
        self._reason = reason
        if not new.content:
            return []
        where = {"item_id": f"msg_{self.id}", "output_index": 0, "content_index": 0}
        return [self._event("response.output_text.delta", **where, delta=new.content, logprobs=[])]

    def last_chunks(self, outputs: Sequence[RequestOutput], include_usage: bool) -> list[dict[str, Any]]:
        parsed, where = self._parsed, {"item_id": f"msg_{self.id}", "output_index": 0}
        part = {"type": "output_text", "text": parsed.content, "annotations": []}
        response = self._response(parsed, outputs[0].outputs[0].finish_reason, outputs)
        events = [
            self._event("response.output_text.done", **where, content_index=0, text=parsed.content, logprobs=[]),
            self._event("response.content_part.done", **where, content_index=0, part=part),
            self._event("response.output_item.done", output_index=0, item=self._message(parsed)),
        ]
        for number, item in enumerate(response["output"]):
            if item["type"] == "function_call":
                events.append(self._event("response.output_item.added", output_index=number, item=item))
                events.append(self._event("response.output_item.done", output_index=number, item=item))
        kind = "response.incomplete" if response["status"] == "incomplete" else "response.completed"
        return [*events, self._event(kind, response=response)]

    def _event(self, kind: str, **values: Any) -> dict[str, Any]:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1, **values}

    def _message(self, parsed: Parsed) -> dict[str, Any]:
        content = [{"type": "output_text", "text": parsed.content, "annotations": []}]
        return {
            "id": f"msg_{self.id}", "type": "message", "role": "assistant", "status": "completed", "content": content,
        }  # fmt: skip

    def _response(self, parsed: Parsed, reason: str | None, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        output: list[dict[str, Any]] = []
        if parsed.reasoning:
            text = [{"type": "reasoning_text", "text": parsed.reasoning}]
            output.append({"id": f"rs_{self.id}", "type": "reasoning", "summary": [], "content": text})
        if reason is not None and (parsed.content or not parsed.tool_calls):
            output.append(self._message(parsed))
        output += [
            {"type": "function_call", "id": f"fc_{call.id}", "call_id": call.id, "name": call.name,
             "arguments": call.arguments, "status": "completed"}
            for call in parsed.tool_calls
        ]  # fmt: skip
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
            "output": output, "error": None, "instructions": None, "metadata": {}, "tools": [], "tool_choice": "auto",
            "parallel_tool_calls": True, "temperature": None, "top_p": None, "usage": usage if outputs else None,
            "incomplete_details": {"reason": "max_output_tokens"} if reason == "length" else None,
        }  # fmt: skip
