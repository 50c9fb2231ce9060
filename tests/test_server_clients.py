"""The clients that people use: openai, litellm and langchain, against a model that calls tools and one that may not say
what it likes."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Iterator
from enum import Enum
from typing import Any

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("llguidance")
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # read when it is imported: prices come with it, not from the web
litellm = pytest.importorskip("litellm")
langchain_openai = pytest.importorskip("langchain_openai")

from pydantic import BaseModel, ConfigDict  # noqa: E402
from running_server import NAME, Running, serve  # noqa: E402
from scripted_model import HERMES, LLAMA, scripted  # noqa: E402
from served_model import USER, _one_thread, base_fixture, folder_fixture, running_fixture  # noqa: E402, F401

from flashkernel.engine import LLM, SamplingParams  # noqa: E402

WEATHER = {
    "name": "weather", "description": "The weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}  # fmt: skip
CLOCK = {"name": "clock", "description": "The time", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": function} for function in (WEATHER, CLOCK)]
FUNCTIONS = [{"type": "function", **function} for function in (WEATHER, CLOCK)]
CALLS = (
    'I look. <tool_call>\n{"name": "weather", "arguments": {"city": "Kiel"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
)
EXPECTED = [("weather", {"city": "Kiel"}), ("clock", {})]


class Kind(str, Enum):
    WIND = "wind"
    SEA = "sea"


class Report(BaseModel):
    """What structured outputs are made of; with other keys a model could go on for ever."""

    model_config = ConfigDict(extra="forbid")
    kind: Kind
    rough: bool


@pytest.fixture(scope="module", name="calling")
def calling_fixture(base: LLM) -> Iterator[Running]:
    """A model that answers everything with two calls of tools."""
    with serve(scripted(base, CALLS, HERMES)) as running:
        yield running


def _calls(found: Any) -> list[tuple[str, Any]]:
    """Name and arguments of calls in OpenAI's format."""
    return [(call.function.name, json.loads(call.function.arguments)) for call in found]


def _litellm(running: Running, **given: Any) -> Any:
    return litellm.completion(
        **{"model": f"openai/{NAME}", "api_base": running.url, "api_key": "none", "messages": USER, **given}
    )


def _langchain(running: Running, **given: Any) -> Any:
    return langchain_openai.ChatOpenAI(
        **{"model": NAME, "base_url": running.url, "api_key": "none", "max_retries": 0, **given}
    )


def _joined(chunks: Any) -> Any:
    """langchain's chunks as one message."""
    whole = None
    for chunk in chunks:
        whole = chunk if whole is None else whole + chunk
    return whole


@pytest.mark.parametrize("choice", [None, "auto"])
def test_openai_gets_calls_that_the_model_makes(calling: Running, choice: str | None) -> None:
    given = {"model": NAME, "messages": USER, "tools": TOOLS, **({"tool_choice": choice} if choice else {})}
    (found,) = calling.client().chat.completions.create(**given).choices
    assert (found.message.content, found.finish_reason) == ("I look. ", "tool_calls")
    assert _calls(found.message.tool_calls) == EXPECTED
    assert len({call.id for call in found.message.tool_calls}) == 2
    chunks = list(calling.client().chat.completions.create(**given, stream=True))
    assert all(chunk.choices[0].delta.model_dump(exclude_unset=True) for chunk in chunks[:-1]), "no empty chunks"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "I look. "
    streamed = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert [call.index for call in streamed] == [0, 1]
    assert _calls(streamed) == EXPECTED
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_litellm_gets_calls_that_the_model_makes(calling: Running) -> None:
    whole = _litellm(calling, tools=TOOLS)
    streamed = litellm.stream_chunk_builder(list(_litellm(calling, tools=TOOLS, stream=True)))
    for found in (whole, streamed):
        assert found.choices[0].finish_reason == "tool_calls"
        assert found.choices[0].message.content == "I look. "
        assert _calls(found.choices[0].message.tool_calls) == EXPECTED


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
def test_langchain_gets_calls_that_the_model_makes(calling: Running, responses: bool) -> None:
    model = _langchain(calling, use_responses_api=responses).bind_tools(TOOLS)
    for found in (model.invoke("the sea"), _joined(model.stream("the sea"))):
        assert [(call["name"], call["args"]) for call in found.tool_calls] == EXPECTED
        assert not found.invalid_tool_calls
        assert found.text == "I look. "
        assert found.response_metadata.get("finish_reason", "tool_calls") == "tool_calls"


def test_results_of_tools_go_back(base: LLM, calling: Running) -> None:
    """A conversation with calls and their results, as each client sends it back."""
    from langchain_core.messages import HumanMessage, ToolMessage

    prompts: list[Any] = []
    add = calling.llm.engine.add_requests

    def noting(requests: Any) -> None:
        assert calling.llm.tokenizer is not None
        given = list(requests)
        prompts.extend(calling.llm.tokenizer.decode(prompt) for _, prompt, *_ in given)
        add(given)

    calling.llm.engine.add_requests = noting  # type: ignore[method-assign]
    try:
        client = calling.client()
        said = client.chat.completions.create(model=NAME, messages=USER, tools=TOOLS).choices[0].message
        results = [{"role": "tool", "tool_call_id": call.id, "content": "storm"} for call in said.tool_calls]
        client.chat.completions.create(model=NAME, messages=[*USER, said, *results], tools=TOOLS)
        _litellm(calling, messages=[*USER, said.model_dump(exclude_none=True), *results], tools=TOOLS)
        model = _langchain(calling).bind_tools(TOOLS)
        answer = model.invoke("the sea")
        told = [ToolMessage("storm", tool_call_id=call["id"]) for call in answer.tool_calls]
        model.invoke([HumanMessage("the sea"), answer, *told])
        response = client.responses.create(model=NAME, input="the sea", tools=FUNCTIONS)
        outputs = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "storm"}
            for item in response.output
            if item.type == "function_call"
        ]
        client.responses.create(model=NAME, input=[*USER, *response.output, *outputs], tools=FUNCTIONS)
    finally:
        del calling.llm.engine.add_requests
    seconds = [prompt for prompt in prompts if "storm" in prompt]
    assert len(seconds) == 4
    assert all(prompt.count("storm") == 2 and "assistant: I look." in prompt for prompt in seconds)
    assert len({prompt.strip() for prompt in seconds}) == 1, "all say the same in the end"


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"weather", "clock"}), ({"type": "function", "function": {"name": "clock"}}, {"clock"})],
    ids=["required", "named"],
)
def test_calls_that_are_forced(running: Running, choice: Any, names: set[str]) -> None:
    """The model would say something else: its grammar lets it only call, also where its template has no tools."""
    simple = [{"type": "function", "function": {"name": name, "parameters": REPORT}} for name in ("weather", "clock")]
    given: dict[str, Any] = {"tools": simple, "tool_choice": choice, "parallel_tool_calls": False, "seed": 3}
    client = running.client()
    whole = client.chat.completions.create(model=NAME, messages=USER, **given).choices[0]
    chunks = list(client.chat.completions.create(model=NAME, messages=USER, **given, stream=True))
    streamed = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    other = _litellm(running, **given).choices[0]
    joined = litellm.stream_chunk_builder(list(_litellm(running, **given, stream=True))).choices[0]
    for found in (whole.message.tool_calls, streamed, other.message.tool_calls, joined.message.tool_calls):
        ((name, arguments),) = _calls(found)
        assert name in names
        Report(**arguments)
    for ended in (whole, chunks[-1].choices[0], other, joined):
        assert ended.finish_reason == "tool_calls"
    chosen = choice if isinstance(choice, str) else "clock"
    model = _langchain(running, seed=3).bind_tools(simple, tool_choice=chosen, parallel_tool_calls=False)
    for found in (model.invoke("the sea"), _joined(model.stream("the sea"))):
        (call,) = found.tool_calls
        assert call["name"] in names
        Report(**call["args"])
        assert not found.invalid_tool_calls


REPORT = {
    "type": "object",
    "properties": {"kind": {"enum": ["wind", "sea"]}, "rough": {"type": "boolean"}},
    "required": ["kind", "rough"],
    "additionalProperties": False,
}


def test_tools_that_the_model_would_never_hear_of(running: Running) -> None:
    """With a template that has no tools a model cannot choose to call one, and nobody would be told."""
    with pytest.raises(openai.BadRequestError, match="the model's chat template has no tools") as refused:
        running.client().chat.completions.create(model=NAME, messages=USER, tools=TOOLS)
    assert refused.value.param == "tools"
    running.client().chat.completions.create(model=NAME, messages=USER, tools=TOOLS, tool_choice="none", max_tokens=2)


def test_a_text_that_is_no_call(base: LLM) -> None:
    with serve(scripted(base, '{"sea": 1}', LLAMA)) as running:
        found = running.client().chat.completions.create(model=NAME, messages=USER, tools=TOOLS).choices[0]
        assert (found.message.content, found.message.tool_calls, found.finish_reason) == ('{"sea": 1}', None, "stop")
        assert _langchain(running).bind_tools(TOOLS).invoke("the sea").tool_calls == []
    with serve(scripted(base, '{"name": "weather", "parameters": {"city": "Kiel"}}', LLAMA)) as running:
        found = running.client().chat.completions.create(model=NAME, messages=USER, tools=TOOLS).choices[0]
        assert _calls(found.message.tool_calls) == EXPECTED[:1]


def test_structured_outputs_of_all_clients(running: Running) -> None:
    client = running.client()
    parsed = client.chat.completions.parse(model=NAME, messages=USER, response_format=Report, seed=5)
    assert isinstance(parsed.choices[0].message.parsed, Report)
    with client.chat.completions.stream(model=NAME, messages=USER, response_format=Report, seed=5) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.parsed == parsed.choices[0].message.parsed
    assert isinstance(client.responses.parse(model=NAME, input="the sea", text_format=Report).output_parsed, Report)
    text = _litellm(running, response_format=Report).choices[0].message.content
    Report.model_validate_json(text)
    for method in ("json_schema", "function_calling"):
        found = _langchain(running).with_structured_output(Report, method=method).invoke("the sea")
        assert isinstance(found, Report)
    limited = {"type": "regex", "regex": "(wind|sea){2}"}
    text = _litellm(running, extra_body={"response_format": limited}).choices[0].message.content
    assert re.fullmatch("(wind|sea){2}", text)


def test_texts_of_all_clients(running: Running, base: LLM) -> None:
    done = base.chat(USER, SamplingParams(max_tokens=9, ignore_eos=True)).outputs[0]
    extra: dict[str, Any] = {"max_tokens": 9, "temperature": 0, "extra_body": {"ignore_eos": True}}
    assert _litellm(running, **extra).choices[0].message.content == done.text
    chunks = list(_litellm(running, **extra, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == done.text
    assert litellm.stream_chunk_builder(chunks).usage.completion_tokens == 9
    text = litellm.text_completion(
        model=f"text-completion-openai/{NAME}", api_base=running.url, api_key="none", prompt="the sea", **extra
    )
    assert (
        text.choices[0].text
        == base.generate("the sea", SamplingParams(max_tokens=9, ignore_eos=True))[0].outputs[0].text
    )
    model = _langchain(running, **extra)
    assert model.invoke("the sea").content == done.text
    assert model.invoke("the sea").usage_metadata["output_tokens"] == 9
    assert _joined(model.stream("the sea")).content == done.text

    async def together() -> list[Any]:
        return await asyncio.gather(*(model.ainvoke("the sea") for _ in range(4)))

    assert {found.content for found in asyncio.run(together())} == {done.text}


def test_settings_of_all_clients(running: Running, base: LLM) -> None:
    """Several choices, log probabilities, biases, least tokens and stop tokens."""
    from langchain_core.messages import HumanMessage

    assert base.tokenizer is not None
    sea = base.tokenizer.encode("sea", add_special_tokens=False)[-1]
    biased = {"temperature": 0, "max_tokens": 3, "logit_bias": {str(sea): 100}}
    text = base.tokenizer.decode([sea]) * 3
    assert _litellm(running, **biased).choices[0].message.content == text
    assert _langchain(running, temperature=0, max_tokens=3, logit_bias={sea: 100}).invoke("x").content == text
    found = _litellm(running, n=3, seed=1, max_tokens=6)
    assert len({choice.message.content for choice in found.choices}) == 3
    assert len(_langchain(running, n=2, seed=1, max_tokens=6).generate([[HumanMessage("the sea")]]).generations[0]) == 2
    logged = _litellm(running, logprobs=True, top_logprobs=2, max_tokens=4, temperature=0)
    assert [len(one["top_logprobs"]) for one in logged.choices[0].logprobs["content"]] == [2] * 4
    answer = _langchain(running, logprobs=True, top_logprobs=2, max_tokens=4, temperature=0).invoke("the sea")
    assert len(answer.response_metadata["logprobs"]["content"]) == 4
    first = base.chat(USER, SamplingParams(max_tokens=1)).outputs[0].token_ids
    for least, count in ((0, 1), (4, 4)):
        extra = {"stop_token_ids": list(first), "min_tokens": least}
        assert _litellm(running, temperature=0, max_tokens=6, extra_body=extra).usage.completion_tokens >= count
        usage = _langchain(running, temperature=0, max_tokens=6, extra_body=extra).invoke("the sea").usage_metadata
        assert (usage["output_tokens"] == 1) == (least == 0)


def test_clients_know_their_errors(running: Running) -> None:
    long = [{"role": "user", "content": "the sea " * 400}]
    with pytest.raises(openai.BadRequestError) as refused:
        running.client().chat.completions.create(model=NAME, messages=long)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(litellm.ContextWindowExceededError):
        _litellm(running, messages=long)
    with pytest.raises(litellm.NotFoundError):
        _litellm(running, model="openai/another")
    with pytest.raises(langchain_openai.chat_models.base.OpenAIContextOverflowError):
        _langchain(running).invoke("the sea " * 400)


def test_responses_of_all_clients(running: Running, calling: Running) -> None:
    client = running.client()
    asked: dict[str, Any] = {"model": NAME, "input": "the sea", "max_output_tokens": 6, "temperature": 0}
    whole = client.responses.create(**asked, instructions="sea")
    assert (whole.instructions, whole.temperature, whole.max_output_tokens) == ("sea", 0.0, 6)
    events = list(client.responses.create(**asked, instructions="sea", stream=True))
    assert (events[-1].type, events[-1].response.output_text) == ("response.incomplete", whole.output_text)
    wire = running.call("POST", "/v1/responses", {**asked, "stream": True})[1].strip().split("\n\n")
    for text in wire:  # browsers choose listeners by the name
        name, data = text.split("\n")
        assert (name.removeprefix("event: ")) == json.loads(data.removeprefix("data: "))["type"]
    found = litellm.responses(api_base=running.url, api_key="none", **{**asked, "model": f"openai/{NAME}"})
    assert found.output[0].content[0].text == client.responses.create(**asked).output_text
    with pytest.raises(openai.BadRequestError, match="gives one answer"):
        client.responses.create(**asked, extra_body={"n": 2})
    with pytest.raises(openai.BadRequestError, match=r"text\.format has the type json_schema and no schema"):
        client.responses.create(**asked, text={"format": {"type": "json_schema", "name": "wind"}})
    with calling.client().responses.stream(model=NAME, input="the sea", tools=FUNCTIONS) as stream:
        events = list(stream)
    ended = [event.item for event in events if event.type == "response.output_item.done"]
    assert [event.output_index for event in events if event.type == "response.output_item.added"] == [0, 1, 2]
    assert [item.id for item in ended] == [item.id for item in events[-1].response.output]
    assert [(item.name, json.loads(item.arguments)) for item in ended[1:]] == EXPECTED


def test_reasoning_and_calls_in_a_stream_of_responses(base: LLM) -> None:
    """gpt-oss's channels: reasoning is an item of its own, and no empty message stands before a call."""
    template = "<|channel|><|message|>{% if tools %}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    text = (
        "<|channel|>analysis<|message|>Hmm.<|start|>assistant<|channel|>commentary to=functions.weather "
        '<|constrain|>json<|message|>{"city": "Kiel"}<|call|>'
    )
    with serve(scripted(base, text, template)) as running:
        events = list(running.client().responses.create(model=NAME, input="x", tools=FUNCTIONS, stream=True))
        whole = running.client().responses.create(model=NAME, input="x", tools=FUNCTIONS)
        chat = running.client().chat.completions.create(model=NAME, messages=USER, tools=TOOLS).choices[0]
    for response in (events[-1].response, whole):
        assert [item.type for item in response.output] == ["reasoning", "function_call"]
        assert response.output[0].content[0].text == "Hmm."
    assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == "Hmm."
    assert (chat.message.reasoning_content, chat.finish_reason) == ("Hmm.", "tool_calls")
