"""What clients of OpenAI's API expect beside plain texts: several choices, biases, tools, structured outputs, channels,
/v1/responses, CORS; with the real client."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from typing import Any

import openai
import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from running_server import NAME, Running, other, serve
from scripted_model import count_compiled_templates, scripted
from served_model import (  # noqa: F401
    GREEDY,
    USER,
    _one_thread,
    base_fixture,
    client_fixture,
    folder_fixture,
    running_fixture,
)

import flashkernel
from flashkernel.engine import LLM, SamplingParams, Tokenizer
from flashkernel.engine.grammar import GrammarCompiler
from flashkernel.engine.server import output_parsers as parsers
from flashkernel.engine.server.formatters import CompletionFormatter
from flashkernel.engine.server.protocol import ChatRequest, parse

TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
HERMES = "{% if tools %}<tool_call>{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"


def test_several_choices_of_a_prompt(client: Any) -> None:
    found = client.completions.create(model=NAME, prompt="the sea", n=3, seed=4, temperature=1.5, max_tokens=8)
    texts = [choice.text for choice in found.choices]
    assert [choice.index for choice in found.choices] == [0, 1, 2]
    assert len(set(texts)) > 1
    alone = client.completions.create(model=NAME, prompt="the sea", seed=4, temperature=1.5, max_tokens=8)
    assert alone.choices[0].text == texts[0]
    assert found.usage.prompt_tokens == alone.usage.prompt_tokens
    streamed = ["", "", ""]
    for chunk in client.completions.create(
        model=NAME, prompt="the sea", n=3, seed=4, temperature=1.5, max_tokens=8, stream=True
    ):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts


def test_the_choices_of_a_prompt_count_its_tokens_once(base: LLM) -> None:
    """Those found in the prefix cache as well, which the choices fill for each other."""
    prompt = list(range(1, 60))
    with serve(other(base)) as running:
        client = running.client()
        for stream in (False, True):
            asked = {"model": NAME, "prompt": [prompt, prompt[::-1]], "max_tokens": 2, "n": 4}
            if stream:
                *_, last = client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
            else:
                last = client.completions.create(**asked)
            assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (118, 16)
            cached = last.usage.prompt_tokens_details.cached_tokens
            assert cached == (2 * 48 if stream else 0), "48 tokens fill three blocks"


def test_the_prompt_alone_ends_by_its_length(base: LLM) -> None:
    """With max_tokens of 0, also where the token that was sampled and left out is an end."""
    with serve(scripted(base, "")) as running:
        asked = {"model": NAME, "prompt": "the sea", "echo": True, "max_tokens": 0}
        whole = running.client().completions.create(**asked).choices[0]
        streamed = [chunk.choices[0] for chunk in running.client().completions.create(**asked, stream=True)]
    assert (whole.text, whole.finish_reason) == ("the sea", "length")
    assert ("".join(one.text for one in streamed), streamed[-1].finish_reason) == ("the sea", "length")


def test_biases_and_least_tokens(client: Any, base: LLM) -> None:
    assert base.tokenizer is not None
    token = base.tokenizer.encode("sea", add_special_tokens=False)[-1]
    found = client.completions.create(
        model=NAME, prompt="the", max_tokens=3, temperature=0, logit_bias={str(token): 100}, logprobs=0
    )
    assert found.choices[0].text.replace(" ", "") == base.tokenizer.decode([token]).strip() * 3
    stops = base.generate(["the"], SamplingParams(max_tokens=1))[0].outputs[0].token_ids
    for least, count in ((0, 1), (4, 4)):
        found = client.completions.create(
            model=NAME, prompt="the", max_tokens=6, temperature=0,
            extra_body={"min_tokens": least, "stop_token_ids": list(stops)},
        )  # fmt: skip
        assert found.usage.completion_tokens >= count
        assert (found.usage.completion_tokens == 1) == (least == 0)


def test_echo_repeats_the_prompt(client: Any, base: LLM) -> None:
    """With log probabilities of its tokens, whole and in a stream; also of lists of tokens, and without an answer."""
    assert base.tokenizer is not None
    prompts = ["the sea", "wind and the sand"]
    plain = client.completions.create(model=NAME, prompt=prompts, max_tokens=5, temperature=0, logprobs=2)
    asked: dict[str, Any] = {"model": NAME, "max_tokens": 5, "temperature": 0, "logprobs": 2, "echo": True}
    echoed = client.completions.create(**asked, prompt=prompts)
    tokens = [base.tokenizer.encode(prompt) for prompt in prompts]
    assert client.completions.create(**asked, prompt=tokens).choices == echoed.choices
    expected = base.generate(prompts, SamplingParams(max_tokens=5, prompt_logprobs=2))
    for index, prompt in enumerate(prompts):
        choice, rest, count = echoed.choices[index], plain.choices[index], len(tokens[index])
        assert choice.text == prompt + rest.text
        logs = choice.logprobs
        assert logs.tokens == [base.tokenizer.token_text(token) for token in tokens[index]] + rest.logprobs.tokens
        assert logs.token_logprobs[0] is logs.top_logprobs[0] is None
        scores = expected[index].prompt_logprobs
        assert scores is not None
        assert logs.token_logprobs[1:count] == pytest.approx([one.logprob for one in scores[1:] if one], abs=1e-4)
        assert logs.token_logprobs[count:] == pytest.approx(rest.logprobs.token_logprobs, abs=1e-4)
        assert all(token in top for token, top in zip(logs.tokens[1:], logs.top_logprobs[1:]))
        assert logs.text_offset == [
            len("".join(logs.tokens[:place])) for place in range(count + len(rest.logprobs.tokens))
        ]
    assert echoed.usage == plain.usage

    texts, streamed = ["", ""], [[], []]
    for chunk in client.completions.create(**asked, prompt=prompts, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            streamed[choice.index] += choice.logprobs.token_logprobs
    assert texts == [choice.text for choice in echoed.choices]
    for found, choice in zip(streamed, echoed.choices):
        assert found[1:] == pytest.approx(choice.logprobs.token_logprobs[1:], abs=1e-4)

    alone = client.completions.create(**{**asked, "max_tokens": 0}, prompt=prompts[1])
    assert (alone.choices[0].text, alone.choices[0].finish_reason) == (prompts[1], "length")
    assert alone.choices[0].logprobs.token_logprobs == echoed.choices[1].logprobs.token_logprobs[: len(tokens[1])]
    assert (alone.usage.completion_tokens, alone.usage.total_tokens) == (0, len(tokens[1]))
    several = client.completions.create(**{**asked, "n": 2, "seed": 1, "temperature": 1.0}, prompt=prompts[0])
    assert [choice.text[: len(prompts[0])] for choice in several.choices] == [prompts[0]] * 2
    assert all(choice.logprobs.token_logprobs[1] is not None for choice in several.choices)
    silent = client.completions.create(**{**asked, "logprobs": None}, prompt=prompts[0])
    assert (silent.choices[0].logprobs, silent.choices[0].text) == (None, echoed.choices[0].text)


def test_prompt_logprobs_as_vllm_has_them(client: Any, base: LLM) -> None:
    assert base.tokenizer is not None
    tokens = base.tokenizer.encode("the sea and")
    found = client.completions.create(
        model=NAME, prompt="the sea and", max_tokens=2, n=2, extra_body={"prompt_logprobs": 3}
    )
    (expected,) = base.generate("the sea and", SamplingParams(max_tokens=2, prompt_logprobs=3))
    assert expected.prompt_logprobs is not None
    for choice in found.choices:
        assert len(choice.prompt_logprobs) == len(tokens)
        assert choice.prompt_logprobs[0] is None
        for token, one, score in zip(tokens[1:], choice.prompt_logprobs[1:], expected.prompt_logprobs[1:]):
            assert score is not None
            assert one[str(token)]["logprob"] == pytest.approx(score.logprob, abs=1e-4)
            assert one[str(token)]["rank"] == score.rank
            assert one[str(token)]["decoded_token"] == base.tokenizer.token_text(token)
            assert len(one) == 3 + (score.rank > 3)
    chat = client.chat.completions.create(model=NAME, messages=USER, max_tokens=2, extra_body={"prompt_logprobs": 0})
    assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens


def test_prompt_logprobs_are_written_beside_the_event_loop(
    running: Running, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a long prompt take seconds, in which other clients get their tokens."""
    threads, response = [], CompletionFormatter.response

    def noting(self: CompletionFormatter, *given: Any) -> Any:
        threads.append(threading.current_thread())
        return response(self, *given)

    monkeypatch.setattr(CompletionFormatter, "response", noting)
    asked: dict[str, Any] = {"model": NAME, "prompt": "the sea", "max_tokens": 2}
    client.completions.create(**asked)
    client.completions.create(**asked, extra_body={"prompt_logprobs": 1})
    client.completions.create(**asked, echo=True, logprobs=1)
    assert [thread is running.thread for thread in threads] == [True, False, False]


def test_best_of_as_many_as_are_returned(client: Any) -> None:
    found = client.completions.create(model=NAME, prompt="the sea", max_tokens=3, n=2, best_of=2)
    assert len(found.choices) == 2


def test_unknown_fields_are_ignored_with_a_warning(client: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "flashkernel.server"):
        client.completions.create(model=NAME, prompt="the sea", max_tokens=2, extra_body={"temprature": 1})
    assert "'temprature' is no field of this request; it is ignored" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "flashkernel.server"):
        options = {"include_usage": True, "continuous_usage_stats": True}
        list(client.completions.create(model=NAME, prompt="sea", max_tokens=2, stream=True, stream_options=options))
    assert "'stream_options.continuous_usage_stats' is no field of this request; it is ignored" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "flashkernel.server"):
        many = {f"field_{number}": 1 for number in range(1000)}
        client.completions.create(model=NAME, prompt="the sea", max_tokens=2, extra_body=many)
    assert len(caplog.records) == 10, "one request does not flood the log"


@pytest.mark.parametrize(
    ("name", "harmless", "value"),
    [("guided_json", None, {"type": "integer"}), ("include_stop_str_in_output", False, True), ("bad_words", [], ["a"])],
)
def test_fields_of_vllm_that_would_change_the_text_are_refused(
    name: str, harmless: Any, value: Any, client: Any
) -> None:
    asked = {"model": NAME, "prompt": "the sea", "max_tokens": 2}
    assert client.completions.create(**asked, extra_body={name: harmless}).choices
    with pytest.raises(openai.BadRequestError, match=f"{name} is .*; this server cannot do that"):
        client.completions.create(**asked, extra_body={name: value})


def test_version_and_cors(base: LLM, running: Running) -> None:
    assert running.call("GET", "/version")[1] == {"version": flashkernel.__version__}
    page = {"origin": "https://page.example", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in running.call("OPTIONS", "/v1/completions", None, **page)[2]
    with serve(other(base), allowed_origins=("https://page.example",)) as open_:
        status, _, headers = open_.call("OPTIONS", "/v1/completions", None, **page)
        assert status == 200
        assert headers["access-control-allow-origin"] == "https://page.example"


def test_tokens_of_a_text_and_back(running: Running, base: LLM) -> None:
    assert base.tokenizer is not None
    expected = base.tokenizer.encode("the sea")
    for named in ({"model": NAME}, {}):
        status, found, _ = running.call("POST", "/tokenize", {**named, "prompt": "the sea"})
        assert status == 200
        assert found == {"count": len(expected), "max_model_len": 256, "tokens": expected, "token_strs": None}
        assert running.call("POST", "/detokenize", {**named, "tokens": expected})[1] == {"prompt": "the sea"}
    texts = running.call("POST", "/tokenize", {"prompt": "the sea", "return_token_strs": True})[1]["token_strs"]
    assert texts == [base.tokenizer.backend.id_to_token(token) for token in expected]
    assert running.call("POST", "/detokenize", {"tokens": [0]})[1] == {"prompt": "<|end|>"}


def test_tokens_of_a_conversation(running: Running, base: LLM) -> None:
    assert base.tokenizer is not None
    for head in (True, False):
        said = {"messages": USER, "add_generation_prompt": head}
        found = running.call("POST", "/tokenize", said)[1]["tokens"]
        assert found == base.tokenizer.apply_chat_template(USER, add_generation_prompt=head)
    usage = running.client().chat.completions.create(model=NAME, messages=USER, max_tokens=1).usage
    assert usage.prompt_tokens == running.call("POST", "/tokenize", {"messages": USER})[1]["count"]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/tokenize", {}, "give either a prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": USER}, "give either a prompt or messages"),
        ("/tokenize", {"messages": []}, "chat: a conversation is a list of messages, at least one"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "there is no model 'other' here"),
        ("/detokenize", {"tokens": [1, 320]}, "token 320 is not in the vocabulary"),
        ("/detokenize", {"tokens": [-1]}, "token -1 is not in the vocabulary"),
        ("/detokenize", {"tokens": [2**40]}, f"token {2**40} is not in the vocabulary"),
        ("/detokenize", {"tokens": "a"}, "tokens is 'a'"),
    ],
)
def test_what_cannot_be_tokenized(running: Running, path: str, body: dict[str, Any], message: str) -> None:
    status, found, _ = running.call("POST", path, body)
    assert status == (404 if "model" in body else 400)
    assert found["error"]["message"].startswith(message)


def test_a_stateless_response(client: Any, base: LLM) -> None:
    expected = base.chat([{"role": "system", "content": "sea"}, *USER], SamplingParams(max_tokens=6)).outputs[0].text
    found = client.responses.create(model=NAME, input="the sea", instructions="sea", max_output_tokens=6, temperature=0)
    assert found.output_text == expected
    assert found.status in ("completed", "incomplete")
    assert found.usage.output_tokens == 6 or found.status == "completed"
    items = [{"role": "user", "content": [{"type": "input_text", "text": "the sea"}]}]
    events = list(
        client.responses.create(
            model=NAME, input=items, instructions="sea", max_output_tokens=6, temperature=0, stream=True
        )
    )
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == expected
    assert events[0].type == "response.created"
    assert events[-1].response.output_text == expected
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_tools_reach_the_template_and_calls_come_back(base: LLM) -> None:
    text = 'wind <tool_call>\n{"name": "weather", "arguments": {"city": "Kiel"}}\n</tool_call>'
    with serve(scripted(base, text, HERMES)) as running:
        found = running.client().chat.completions.create(model=NAME, messages=USER, tools=[TOOL])
    (call,) = found.choices[0].message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": "Kiel"}
    assert found.choices[0].message.content == "wind "


def test_requests_with_tools() -> None:
    def request(**more: Any) -> ChatRequest:
        return parse(ChatRequest, json.dumps({"model": "m", "messages": USER, "tools": [TOOL], **more}).encode())

    assert request()._variables()["tools"][0]["function"]["name"] == "weather"
    assert "tools" not in request(tool_choice="none")._variables()
    assert isinstance(request().parser(HERMES), parsers.MarkedCalls)
    assert isinstance(request(parallel_tool_calls=False).parser(HERMES), parsers.SingleCall)
    channels = request(parallel_tool_calls=False).parser("<|channel|><|message|>")
    assert channels.needs_special_tokens
    named = request(tool_choice={"type": "function", "function": {"name": "weather"}})
    assert named.structured_outputs().json_schema == json.dumps(TOOL["function"]["parameters"])  # type: ignore[union-attr, index]
    assert named.parser(None).whole('{"city": "Kiel"}').tool_calls[0].arguments == '{"city": "Kiel"}'
    required = request(tool_choice="required")
    assert '"weather"' in required.structured_outputs().json_schema  # type: ignore[union-attr, operator]
    single = request(tool_choice="required", parallel_tool_calls=False).structured_outputs()
    assert json.loads(single.json_schema)["maxItems"] == 1  # type: ignore[union-attr, arg-type]
    assert "maxItems" not in json.loads(required.structured_outputs().json_schema)  # type: ignore[union-attr, arg-type]
    calls = required.parser(None).whole('[{"name": "weather", "parameters": {"city": "Kiel"}}]').tool_calls
    assert [(call.name, call.arguments) for call in calls] == [("weather", '{"city": "Kiel"}')]
    kwargs = request(chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low")._variables()
    assert (kwargs["enable_thinking"], kwargs["reasoning_effort"]) == (False, "low")
    history = [{"role": "assistant", "content": None,
                "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]}]  # fmt: skip
    message = request(messages=history).messages[0].as_dict()
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": 1}


@pytest.mark.parametrize(("knows", "role"), [("", "system"), ("{# developer #}", "developer")])
def test_a_developer_is_the_system_where_templates_know_none(base: LLM, knows: str, role: str) -> None:
    assert base.tokenizer is not None
    template = knows + "{% for m in messages %}{{ m.role }} {{ m.content }}{% endfor %}"
    tokenizer = Tokenizer(base.tokenizer.backend, chat_template=template)
    messages = [{"role": "developer", "content": "sea"}, {"role": "user", "content": "wind"}]
    request = parse(ChatRequest, json.dumps({"model": "m", "messages": messages}).encode())
    (prompt,) = request.prompts(tokenizer)
    assert tokenizer.decode(prompt) == f"{role} seauser wind"  # type: ignore[arg-type]


CHANNELS = (
    "<|channel|>analysis<|message|>Hmm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
    '<|constrain|>json<|message|>{"city": "Kiel"}<|call|><|start|>assistant<|channel|>final<|message|>Wind.<|return|>'
)
PARSED = [
    (lambda: parsers.MarkedCalls("<tool_call>", "</tool_call>"),
     'Yes. <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n<tool_call>{"name": "g"}</tool_call>',
     ("Yes. ", "", [("f", '{"a": 1}'), ("g", "{}")])),
    (lambda: parsers.MarkedCalls("<tool_call>", "</tool_call>"), "a < b <tool_call>no</tool_call> <tool",
     ("a < b <tool_call>no</tool_call> <tool", "", [])),
    (lambda: parsers.MarkedCalls("[TOOL_CALLS]", None), '[TOOL_CALLS][{"name": "f", "arguments": {}}]',
     ("", "", [("f", "{}")])),
    (parsers.JsonCalls, '<|python_tag|>{"name": "f", "parameters": {"a": "b"}}', ("", "", [("f", '{"a": "b"}')])),
    (parsers.JsonCalls, '{"not": "a call"}', ('{"not": "a call"}', "", [])),
    (parsers.JsonCalls, '{"name": "Ada", "age": 36}', ('{"name": "Ada", "age": 36}', "", [])),
    (parsers.JsonCalls, '{"name": "f", "parameters": null}', ("", "", [("f", "{}")])),
    (lambda: parsers.MarkedCalls("<tool_call>", "</tool_call>"), 'Yes. <tool_call>{"name": "f", "argu',
     ('Yes. <tool_call>{"name": "f", "argu', "", [])),
    (parsers.Channels, '{"n": 3}', ('{"n": 3}', "", [])),
    (parsers.Channels, " to", (" to", "", [])),
    (parsers.Channels, " to=functions.f<|channel|>commentary json<|message|>{}<|call|>", ("", "", [("f", "{}")])),
    (parsers.Channels, "<|channel|>commentary to=functions.f<|constrain|>json<|message|>{}", ("", "", [("f", "{}")])),
    (lambda: parsers.SingleCall(parsers.MarkedCalls("<tool_call>", "</tool_call>")),
     'Yes. <tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "g"}</tool_call> No.',
     ("Yes. No.", "", [("f", "{}")])),
    (parsers.Channels, "<|message|>Wind.<|return|>", ("Wind.", "", [])),
    (parsers.JsonCalls, "plain text", ("plain text", "", [])),
    (parsers.Channels, CHANNELS, ("Wind.", "Hmm.", [("weather", '{"city": "Kiel"}')])),
    (parsers.OutputParser, "<tool_call>", ("<tool_call>", "", [])),
]  # fmt: skip


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(("make", "text", "expected"), PARSED)
def test_parsers_take_text_in_any_pieces(make: Any, text: str, expected: tuple[str, str, list[Any]], size: int) -> None:
    parser, found = make(), parsers.Parsed()
    for start in range(0, len(text), size):
        found.add(parser.feed(text[start : start + size]))
    found.add(parser.finish())
    assert (found.content, found.reasoning, [(call.name, call.arguments) for call in found.tool_calls]) == expected


def test_templates_say_which_format_is_taught() -> None:
    assert isinstance(parsers.parser_for("<|channel|> <|message|>", False), parsers.Channels)
    assert type(parsers.parser_for("<tool_call>", False)) is parsers.OutputParser
    assert isinstance(parsers.parser_for("[TOOL_CALLS]", True), parsers.MarkedCalls)
    assert isinstance(parsers.parser_for(None, True), parsers.JsonCalls)


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
FORMATS: list[tuple[dict[str, Any], str]] = [
    ({"type": "json_schema", "json_schema": {"name": "number", "schema": SCHEMA}}, r"\{\s*\"n\"\s*:\s*-?\d+\s*\}"),
    ({"type": "regex", "regex": "(ab|cd)+"}, "(ab|cd)+"),
    ({"type": "json_object"}, r"\{.*\}"),
]


@pytest.mark.parametrize(("wanted", "pattern"), FORMATS, ids=["schema", "regex", "object"])
def test_structured_outputs(wanted: dict[str, Any], pattern: str, client: Any) -> None:
    """Whatever the model prefers, the text matches; one that is cut off begins as it must."""
    pytest.importorskip("llguidance")
    found = client.chat.completions.create(
        model=NAME, messages=USER, max_tokens=60, temperature=1.0, seed=1, extra_body={"response_format": wanted}
    )
    text = found.choices[0].message.content
    if found.choices[0].finish_reason == "stop":
        assert re.fullmatch(pattern, text, re.DOTALL)
    else:
        assert text[:1] in "{ac"
    if wanted["type"] == "json_schema":
        assert found.choices[0].finish_reason == "stop" or re.match(r"\{\s*(\"n\"\s*:\s*-?\d*)?", text)


@pytest.mark.parametrize(
    "wanted",
    [
        {"type": "regex", "regex": "(unclosed"},
        {"type": "json_schema", "json_schema": {"schema": {"type": "banana"}}},
        {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}},
    ],
    ids=["regex", "schema", "endless"],
)
def test_structured_outputs_that_cannot_be(client: Any, wanted: dict[str, Any]) -> None:
    pytest.importorskip("llguidance")
    with pytest.raises(openai.BadRequestError, match="this grammar cannot be used"):
        client.completions.create(model=NAME, prompt="a", extra_body={"response_format": wanted})


def test_structured_outputs_are_prepared_before_the_first_request(
    base: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What all grammars share takes long with a large vocabulary, and no stream goes on meanwhile."""
    llguidance = pytest.importorskip("llguidance")
    make, made = llguidance.LLTokenizer, []
    monkeypatch.setattr(llguidance, "LLTokenizer", lambda *given, **named: made.append(0) or make(*given, **named))
    with serve(other(base)) as running:
        assert len(made) == 1
        wanted = {"extra_body": {"response_format": {"type": "regex", "regex": "sea|wind"}}, "max_tokens": 9}
        found = running.client().completions.create(model=NAME, prompt="the", **wanted).choices[0].text
        assert found in ("sea", "wind")
    assert len(made) == 1

    def refuse(*given: Any, **named: Any) -> Any:
        raise ValueError("odd bytes")

    monkeypatch.setattr(llguidance, "LLTokenizer", refuse)
    with serve(other(base)) as running:
        assert "structured outputs will be refused: llguidance does not take this tokenizer: odd bytes" in caplog.text
        client = running.client()
        with pytest.raises(openai.BadRequestError, match="odd bytes"):
            client.completions.create(model=NAME, prompt="the", **wanted)
        assert client.completions.create(model=NAME, prompt="the", max_tokens=2, **GREEDY).choices[0].text


@pytest.mark.parametrize("template", ["{# prepared #}{% for m in messages %}{{ m.content }}{% endfor %}", "{% wrong"])
def test_chat_templates_are_compiled_before_the_first_request(
    base: LLM, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    compiled = count_compiled_templates(monkeypatch)
    with serve(scripted(base, "sea", template)) as running:
        assert compiled == [template]
        create = running.client().chat.completions.create
        if "prepared" in template:
            assert create(model=NAME, messages=USER).choices[0].message.content == "sea"
            assert compiled == [template]
        else:
            with pytest.raises(openai.BadRequestError, match="the model's template does not take this conversation"):
                create(model=NAME, messages=USER)


def test_one_tokenizer_for_all_grammars(base: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the first requests come together."""
    llguidance = pytest.importorskip("llguidance")
    assert base.tokenizer is not None
    compiler = GrammarCompiler(base.tokenizer, base.config.vocab_size, base.config.eos_token_ids)
    make, made = compiler._new_tokenizer, []

    def slow() -> Any:
        made.append(0)
        time.sleep(0.1)
        return make()

    monkeypatch.setattr(compiler, "_new_tokenizer", slow)
    threads = [threading.Thread(target=compiler._llguidance_tokenizer) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert isinstance(compiler._compiled, llguidance.LLTokenizer)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "plan"}}], ids=str)
def test_schemas_of_forced_calls_may_have_references(client: Any, choice: Any) -> None:
    """As pydantic writes those of nested models: they begin at the tool's own schema, wherever it stands."""
    pytest.importorskip("llguidance")
    word = {"enum": ["wind", "sea"], "default": {"$ref": "#/none"}}
    place = {"$ref": "#/$defs/Word"}
    plan = {
        "type": "object", "properties": {"kind": place, "next": {"anyOf": [place]}},
        "required": ["kind", "next"], "additionalProperties": False, "$defs": {"Word": word},
    }  # fmt: skip
    tools = [{"type": "function", "function": {"name": name, "parameters": plan}} for name in ("plan", "other")]
    for seed in range(3):
        found = client.chat.completions.create(
            model=NAME, messages=USER, tools=tools, tool_choice=choice, seed=seed, parallel_tool_calls=False
        )
        (call,) = found.choices[0].message.tool_calls
        arguments = json.loads(call.function.arguments)
        assert set(arguments) == {"kind", "next"}
        assert set(arguments.values()) <= {"wind", "sea"}
