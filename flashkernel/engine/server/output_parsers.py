"""What a model's text consists of: an answer, reasoning, and calls of tools, in the format that its template teaches.

A parser takes text as it is generated. It holds back what may be the beginning of a tool call.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_VALUES = ("const", "enum", "default", "examples")  # of a JSON schema: no schemas inside


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool; `arguments` are JSON."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    def as_dict(self) -> dict[str, Any]:
        """The call in OpenAI's format."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass
class Parsed:
    """New parts of a message."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    def add(self, other: Parsed) -> None:
        """Appends what came later."""
        self.content += other.content
        self.reasoning += other.reasoning
        self.tool_calls += other.tool_calls


class OutputParser:
    """All text is the answer."""

    needs_special_tokens = False  # the format is made of special tokens, which the text must then have

    def feed(self, text: str) -> Parsed:
        """Takes new text; returns what is certain."""
        return Parsed(content=text)

    def finish(self) -> Parsed:
        """Returns what was held back, when the text has ended."""
        return Parsed()

    def whole(self, text: str) -> Parsed:
        """The parts of a whole text."""
        found = self.feed(text)
        found.add(self.finish())
        return found


class MarkedCalls(OutputParser):
    """Calls between two marks, such as Qwen's and Hermes' <tool_call>; without an end mark, to the end of the text."""

    def __init__(self, start: str, end: str | None) -> None:
        self._start, self._end = start, end
        self.needs_special_tokens = end is None
        self._buffer, self._inside = "", False
        self._after_call = False  # space after a call is dropped

    def feed(self, text: str) -> Parsed:
        self._buffer += text
        found = Parsed()
        while True:
            if not self._inside:
                if self._after_call:
                    self._buffer = self._buffer.lstrip()
                    self._after_call = not self._buffer
                before, mark, after = self._buffer.partition(self._start)
                if not mark:
                    held = _partial(before, self._start)
                    found.content += before[: len(before) - held]
                    self._buffer = before[len(before) - held :]
                    return found
                found.content += before if before.strip() else ""
                self._buffer, self._inside = after, True
            if self._end is None or self._end not in self._buffer:
                return found
            inner, _, self._buffer = self._buffer.partition(self._end)
            self._inside = False
            parsed = self._calls(inner, self._end)
            self._after_call = bool(parsed.tool_calls)
            found.add(parsed)

    def finish(self) -> Parsed:
        found = self._calls(self._buffer, "") if self._inside else Parsed(content=self._buffer)
        self._buffer, self._inside = "", False
        return found

    def _calls(self, text: str, end: str) -> Parsed:
        calls = _json_calls(text)
        if calls is None:  # no call after all: the reader sees what the model wrote
            return Parsed(content=self._start + text + end)
        return Parsed(tool_calls=calls)


class JsonCalls(OutputParser):
    """Llama 3's calls: the whole text is {"name": ..., "parameters": ...}; without parameters it is an answer."""

    _PREFIX = "<|python_tag|>"

    def __init__(self) -> None:
        self._held: str | None = ""  # None: the text is an answer

    def feed(self, text: str) -> Parsed:
        if self._held is None:
            return Parsed(content=text)
        self._held += text
        begun = self._held.lstrip()
        if begun and not begun.startswith("{") and not self._PREFIX.startswith(begun[: len(self._PREFIX)]):
            begun, self._held = self._held, None
            return Parsed(content=begun)
        return Parsed()

    def finish(self) -> Parsed:
        held, self._held = self._held or "", None
        calls = _json_calls(held.strip().removeprefix(self._PREFIX), needs_arguments=True)
        return Parsed(content=held) if calls is None else Parsed(tool_calls=calls)


class Channels(OutputParser):
    """gpt-oss: the channel "analysis" is reasoning, "final" the answer, "commentary to=functions.x" a call of x.

    Text that begins without a channel, as under a grammar of JSON, is the answer.
    """

    needs_special_tokens = True
    _MARK = re.compile(r"<\|(start|channel|message|end|return|call|constrain)\|>")

    def __init__(self) -> None:
        self._buffer, self._header, self._body = "", "", ""
        self._in_body = self._has_marks = False

    def feed(self, text: str) -> Parsed:
        self._buffer += text
        found = Parsed()
        while (mark := self._MARK.search(self._buffer)) is not None:
            found.add(self._text(self._buffer[: mark.start()]))
            self._buffer = self._buffer[mark.end() :]
            found.add(self._mark(mark[1]))
        held = _partial(self._buffer, *(f"<|{name}|>" for name in ("start", "channel", "message", "end", "return",
                                                                    "call", "constrain")))  # fmt: skip
        found.add(self._text(self._buffer[: len(self._buffer) - held]))
        self._buffer = self._buffer[len(self._buffer) - held :]
        return found

    def finish(self) -> Parsed:
        found = self._text(self._buffer)
        self._buffer = ""
        if not self._has_marks and not self._in_body:
            found.content += self._header
        found.add(self._end())
        return found

    def _mark(self, name: str) -> Parsed:
        self._has_marks = True
        if name == "message":
            self._in_body = True
        elif name in ("start", "channel"):
            found = self._end() if self._in_body else Parsed()
            self._header = f"{self._header} " if name == "channel" and not self._in_body else ""
            self._in_body = False
            return found
        elif name in ("end", "return", "call"):
            return self._end()
        elif not self._in_body:  # constrain, which ends a recipient's name
            self._header += " "
        return Parsed()

    def _text(self, text: str) -> Parsed:
        if not self._in_body:
            self._header += text
            begun = self._header.lstrip()
            if self._has_marks or "to=".startswith(begun[:3]):  # the prompt ends with <|start|>assistant
                return Parsed()
            text, self._header, self._in_body = self._header, "final", True
        if self._tool is not None:
            self._body += text
            return Parsed()
        reasons = "analysis" in self._header or "commentary" in self._header
        return Parsed(reasoning=text) if reasons else Parsed(content=text)

    @property
    def _tool(self) -> str | None:
        found = re.search(r"to=functions\.([\w.-]+)", self._header)
        return None if found is None else found[1]

    def _end(self) -> Parsed:
        found = Parsed()
        if self._in_body and self._tool is not None:
            found.tool_calls.append(ToolCall(self._tool, self._body.strip() or "{}"))
        self._header, self._body, self._in_body = "", "", False
        return found


class SingleCall(OutputParser):
    """What another parser finds, without the calls after the first, for `parallel_tool_calls` of false."""

    def __init__(self, parser: OutputParser) -> None:
        self._parser, self._has_called = parser, False
        self.needs_special_tokens = parser.needs_special_tokens

    def feed(self, text: str) -> Parsed:
        return self._first(self._parser.feed(text))

    def finish(self) -> Parsed:
        return self._first(self._parser.finish())

    def _first(self, found: Parsed) -> Parsed:
        found.tool_calls = [] if self._has_called else found.tool_calls[:1]
        self._has_called = self._has_called or bool(found.tool_calls)
        return found


class NamedCall(OutputParser):
    """The whole text is the arguments of one tool, which the request named."""

    def __init__(self, name: str) -> None:
        self._name, self._text = name, ""

    def feed(self, text: str) -> Parsed:
        self._text += text
        return Parsed()

    def finish(self) -> Parsed:
        text, self._text = self._text, ""
        return Parsed(tool_calls=[ToolCall(self._name, text.strip())])


class RequiredCalls(NamedCall):
    """The whole text is a JSON list of calls, as the grammar of tool_choice="required" makes it."""

    def __init__(self) -> None:
        super().__init__("")

    def finish(self) -> Parsed:
        calls = _json_calls(self._text)
        return Parsed(content=self._text) if calls is None else Parsed(tool_calls=calls)


def parser_for(template: str | None, with_tools: bool) -> OutputParser:
    """A parser for the format that a chat template teaches."""
    text = template or ""
    if "<|channel|>" in text and "<|message|>" in text:
        return Channels()
    if not with_tools:
        return OutputParser()
    if "<tool_call>" in text:
        return MarkedCalls("<tool_call>", "</tool_call>")
    if "[TOOL_CALLS]" in text:
        return MarkedCalls("[TOOL_CALLS]", None)
    return JsonCalls()


def required_schema(tools: Sequence[Mapping[str, Any]], several: bool = True) -> str:
    """The JSON schema of a list of calls of these tools; of one call, unless `several` are allowed."""
    kinds = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["name"]},
                "parameters": _moved(
                    tool.get("parameters") or {"type": "object"}, f"#/items/anyOf/{index}/properties/parameters"
                ),
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for index, tool in enumerate(tools)
    ]
    most = {} if several else {"maxItems": 1}
    return json.dumps({"type": "array", "minItems": 1, **most, "items": {"anyOf": kinds}})


def _moved(schema: Any, place: str) -> Any:
    """A schema for use at `place` of another one: references within it, such as "#/$defs/City", begin there."""
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: one if name in _VALUES else _moved(one, place) for name, one in schema.items()}
    target = found.get("$ref")
    if isinstance(target, str) and (target == "#" or target.startswith("#/")):
        found["$ref"] = place + target[1:]
    return found


def _json_calls(text: str, needs_arguments: bool = False) -> list[ToolCall] | None:
    """Calls from a JSON object or a list of them; None if it is none. A call may have no arguments, unless it needs to:
    any object with a name would be one."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    calls = []
    for one in value if isinstance(value, list) else [value]:
        if not isinstance(one, dict) or not isinstance(one.get("name"), str):
            return None
        if needs_arguments and not {"arguments", "parameters"} & one.keys():
            return None
        arguments = one.get("arguments", one.get("parameters"))
        arguments = {} if arguments is None else arguments
        calls.append(ToolCall(one["name"], arguments if isinstance(arguments, str) else json.dumps(arguments)))
    return calls or None


def _partial(text: str, *marks: str) -> int:
    """How many characters at the end of a text may be the beginning of a mark."""
    longest = 0
    for mark in marks:
        for size in range(min(len(mark) - 1, len(text)), longest, -1):
            if text.endswith(mark[:size]):
                longest = size
                break
    return longest
