"""What the server answers, over real sockets, mostly through the real openai client."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("starlette")

from running_server import NAME, Running, other, serve  # noqa: E402
from scripted_model import scripted  # noqa: E402
from served_model import (  # noqa: E402, F401
    GREEDY,
    USER,
    _expected,
    _one_thread,
    base_fixture,
    client_fixture,
    folder_fixture,
    running_fixture,
)

from flashkernel.engine import LLM, SamplingParams  # noqa: E402


def test_a_completion_is_what_the_engine_makes(client: Any, base: LLM) -> None:
    done = _expected(base, "the sea and", 20)
    found = client.completions.create(model=NAME, prompt="the sea and", max_tokens=20, **GREEDY)
    assert found.object == "text_completion"
    assert found.model == NAME
    assert [choice.text for choice in found.choices] == [done.outputs[0].text]
    assert found.choices[0].finish_reason == "length"
    assert found.usage.prompt_tokens == len(done.prompt_token_ids)
    assert found.usage.completion_tokens == 20
    assert found.usage.total_tokens == len(done.prompt_token_ids) + 20
    tokens = client.completions.create(model=NAME, prompt=list(done.prompt_token_ids), max_tokens=20, **GREEDY)
    assert tokens.choices[0].text == done.outputs[0].text
    assert tokens.id != found.id
    assert found._request_id == found.id
    short = client.completions.create(model=NAME, prompt="the sea and", **GREEDY)
    assert short.usage.completion_tokens == 16, "OpenAI's default"


def test_several_prompts_in_one_call(client: Any, base: LLM) -> None:
    prompts = ["the sea", "the wind", "sand"]
    expected = [_expected(base, prompt, 9).outputs[0].text for prompt in prompts]
    found = client.completions.create(model=NAME, prompt=prompts, max_tokens=9, **GREEDY)
    assert [choice.index for choice in found.choices] == [0, 1, 2]
    assert [choice.text for choice in found.choices] == expected
    assert found.usage.completion_tokens == 27
    texts = ["", "", ""]
    for chunk in client.completions.create(model=NAME, prompt=prompts, max_tokens=9, stream=True, **GREEDY):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == expected


def test_a_chat_is_what_the_engine_makes(client: Any, base: LLM) -> None:
    done = base.chat(USER, SamplingParams(max_tokens=12, ignore_eos=True))
    for limit in ("max_tokens", "max_completion_tokens"):
        found = client.chat.completions.create(model=NAME, messages=USER, **{limit: 12}, **GREEDY)
        assert found.object == "chat.completion"
        assert found.choices[0].message.role == "assistant"
        assert found.choices[0].message.content == done.outputs[0].text
        assert found.choices[0].finish_reason == "length"
        assert found.usage.prompt_tokens == len(done.prompt_token_ids)
    parts = [{"role": "user", "content": [{"type": "text", "text": "the "}, {"type": "text", "text": "sea"}]}]
    found = client.chat.completions.create(model=NAME, messages=parts, max_tokens=12, **GREEDY)
    assert found.choices[0].message.content == done.outputs[0].text
    whole = client.chat.completions.create(model=NAME, messages=USER, **GREEDY)
    assert whole.usage.total_tokens == base.engine.max_model_len, "without a limit it goes on to the end of the context"


def test_streams_say_the_same(client: Any, base: LLM) -> None:
    done = _expected(base, "the sea and", 30)
    chunks = list(client.completions.create(model=NAME, prompt="the sea and", max_tokens=30, stream=True, **GREEDY))
    assert "".join(chunk.choices[0].text for chunk in chunks) == done.outputs[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    assert {chunk.choices[0].finish_reason for chunk in chunks[:-1]} == {None}
    assert len(chunks) > 3, "it came in pieces"
    assert len({chunk.id for chunk in chunks}) == 1

    done = base.chat(USER, SamplingParams(max_tokens=30, ignore_eos=True))
    options = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            model=NAME, messages=USER, max_tokens=30, stream=True, stream_options=options, **GREEDY
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == done.outputs[0].text
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 30
    assert chunks[-1].usage.prompt_tokens == len(done.prompt_token_ids)


def test_a_stream_as_it_looks_on_the_wire(running: Running) -> None:
    body = {"model": NAME, "prompt": "the sea", "max_tokens": 3, "stream": True, "temperature": 0}
    status, text, headers = running.call("POST", "/v1/completions", body)
    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    lines = text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    assert all(json.loads(line.removeprefix("data: "))["object"] == "text_completion" for line in lines[:-2])
    assert text.isascii()


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_events_with_text_alone_are_as_the_others(base: LLM, path: str, usage: bool) -> None:
    """They are written from a template: names with quotes in them, characters that end lines for some readers."""
    text = 'sea "\\ \u2028\u2029 \N{WATER WAVE}\n\x00'
    name = 'a "name" of text'
    llm = scripted(base, text)
    with serve(llm, served_model_name=name) as running:
        said = {"messages": USER} if path.startswith("chat") else {"prompt": "the sea"}
        options = {"stream_options": {"include_usage": True}} if usage else {}
        body = {"model": name, **said, "max_tokens": 60, "stream": True, **options}
        status, wire, _ = running.call("POST", f"/v1/{path}", body)
        whole = running.call("POST", f"/v1/{path}", {"model": name, **said, "max_tokens": 60})[1]["choices"][0]
    assert (status, wire.isascii()) == (200, True)
    events = [json.loads(line.removeprefix("data: ")) for line in wire.split("\n\n")[:-2]]
    ends = [event for event in events if event["choices"]]
    assert len(events) - len(ends) == usage
    assert {tuple(event) for event in ends} == {("id", "object", "created", "model", "choices", *["usage"] * usage)}
    assert {(event["id"], event["model"]) for event in events} == {(events[0]["id"], name)}
    assert all(event["usage"] is None for event in ends if usage)
    choices = [event["choices"][0] for event in ends]
    assert {tuple(choice) for choice in choices} == {tuple(choices[-1])}, "the same fields in all"
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    pieces = [choice["delta"].get("content", "") if said.get("messages") else choice["text"] for choice in choices]
    assert sum(map(bool, pieces)) > 1  # a busy machine sends several tokens in one event
    assert "".join(pieces) == (whole["message"]["content"] if said.get("messages") else whole["text"]) == text


def test_events_of_a_response_are_numbered_and_alike(base: LLM) -> None:
    """Most of them are written from a template, the first of an item is not."""
    text = 'sea "sequence_number":3 \\ \u2028 \N{WATER WAVE}\n\x00'
    with serve(scripted(base, text)) as running:
        body = {"model": NAME, "input": "the sea", "max_output_tokens": 60, "stream": True}
        status, wire, _ = running.call("POST", "/v1/responses", body)
    assert (status, wire.isascii()) == (200, True)
    named = [event.partition("\ndata: ") for event in wire.split("\n\n")[:-1]]
    events = [json.loads(data) for _, _, data in named]
    assert [f"event: {event['type']}" for event in events] == [name for name, _, _ in named]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    item = events[-1]["response"]["output"][0]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert len(deltas) > 1  # a busy machine sends several tokens in one event
    fixed = {"output_index": 0, "content_index": 0, "item_id": item["id"], "logprobs": []}
    for event in deltas:
        assert event == {**event, **fixed, "type": "response.output_text.delta"}
        assert list(event) == list(deltas[0])
    assert "".join(event["delta"] for event in deltas) == item["content"][0]["text"] == text


def test_texts_end_at_stop_strings(client: Any, base: LLM) -> None:
    whole = _expected(base, "the sea", 60).outputs[0].text
    stop = whole[12:16]
    cut = whole[: whole.index(stop)]
    for given in (stop, ["never to be found", stop]):
        found = client.completions.create(model=NAME, prompt="the sea", max_tokens=60, stop=given, **GREEDY)
        assert (found.choices[0].text, found.choices[0].finish_reason) == (cut, "stop")
    stream = client.completions.create(model=NAME, prompt="the sea", max_tokens=60, stop=stop, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in stream) == cut


def test_seeds_repeat_and_settings_count(client: Any) -> None:
    def text(**settings: Any) -> str:
        return client.completions.create(model=NAME, prompt="the sea", max_tokens=20, **settings).choices[0].text

    assert text(seed=7) == text(seed=7)
    assert len({text(seed=seed) for seed in range(4)}) == 4
    assert len({text() for _ in range(4)}) > 1, "the temperature is 1 where none is given"
    assert text(seed=7, top_p=0.01) == text(temperature=0), "next to nothing is left to draw from"
    plain = text(**GREEDY)
    extra = {"ignore_eos": True, "top_k": 1}
    assert text(temperature=1, extra_body=extra) == plain
    assert text(temperature=0, presence_penalty=50.0, extra_body={"ignore_eos": True}) != plain
    assert text(temperature=0, frequency_penalty=50.0, extra_body={"ignore_eos": True}) != plain


def test_logprobs(client: Any, base: LLM) -> None:
    done = _expected(base, "the sea", 5, logprobs=2)
    assert base.tokenizer is not None
    found = client.completions.create(model=NAME, prompt="the sea", max_tokens=5, logprobs=2, **GREEDY)
    logs = found.choices[0].logprobs
    assert logs.token_logprobs == pytest.approx([one.logprob for one in done.outputs[0].logprobs], abs=1e-4)
    assert logs.tokens == [base.tokenizer.token_text(token) for token in done.outputs[0].token_ids]
    assert all(logs.tokens[place] in top for place, top in enumerate(logs.top_logprobs)), "greedy takes the likeliest"
    assert logs.text_offset == [sum(map(len, logs.tokens[:place])) for place in range(5)]
    unlikely = base.tokenizer.encode("z", add_special_tokens=False)[0]
    biased = {"model": NAME, "prompt": "the sea", "max_tokens": 2, "logit_bias": {str(unlikely): 100}, **GREEDY}
    for count in (0, 1, 2):
        logs = client.completions.create(**biased, logprobs=count).choices[0].logprobs
        for token, logprob, top in zip(logs.tokens, logs.token_logprobs, logs.top_logprobs):
            assert top[token] == logprob, "the token is among them, however unlikely"
            assert max(1, count) <= len(top) <= count + 1

    asked = {"model": NAME, "messages": USER, "max_tokens": 5, "logprobs": True, "top_logprobs": 3, **GREEDY}
    content = client.chat.completions.create(**asked).choices[0].logprobs.content
    assert len(content) == 5
    for one in content:
        assert len(one.top_logprobs) == 3
        assert one.top_logprobs[0].token == one.token
        assert one.bytes is None or bytes(one.bytes).decode() == one.token
    streamed = [
        one
        for chunk in client.chat.completions.create(**asked, stream=True)
        if chunk.choices[0].logprobs is not None
        for one in chunk.choices[0].logprobs.content
    ]
    assert [one.token for one in streamed] == [one.token for one in content]
    assert [one.logprob for one in streamed] == pytest.approx([one.logprob for one in content], abs=1e-4)


def test_models_and_health(client: Any, running: Running, base: LLM) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == (NAME, "model", "flashkernel")
    assert client.models.retrieve(NAME).max_model_len == base.engine.max_model_len
    assert running.call("GET", "/health")[:2] == (200, {"status": "ok"})


def test_fifty_at_once_on_a_small_pool(base: LLM) -> None:
    llm = other(base, kv_cache_tokens=256, max_num_seqs=8)
    prompts = [f"the {'sea and the ' * (number % 5)}wind {number}" for number in range(50)]
    counts = [5 + number % 23 for number in range(50)]
    expected = [_expected(base, prompt, count).outputs[0].text for prompt, count in zip(prompts, counts)]

    async def ask(client: Any, number: int) -> str:
        settings = {"model": NAME, "prompt": prompts[number], "max_tokens": counts[number], **GREEDY}
        if number % 2:
            return (await client.completions.create(**settings)).choices[0].text
        stream = await client.completions.create(**settings, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def ask_all(url: str) -> list[str]:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(50)))

    with serve(llm) as running:
        assert asyncio.run(ask_all(running.url)) == expected
        assert running.metric('flashkernel_request_success_total{finished_reason="length"}') == 50


def test_an_answer_that_is_there_before_it_is_waited_for(base: LLM) -> None:
    with serve(other(base)) as running:
        add = running.engine.add

        async def lingering(requests: list[Any]) -> None:
            await add(requests)
            while running.engine._sinks[requests[0].request_id].unfinished:
                await asyncio.sleep(0.01)

        running.engine.add = lingering  # type: ignore[method-assign]
        client, settings = running.client(), {"model": NAME, "prompt": "the sea", "max_tokens": 6, **GREEDY}
        expected = _expected(base, "the sea", 6).outputs[0].text
        assert client.completions.create(**settings).choices[0].text == expected
        chunks = list(client.completions.create(**settings, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == expected
        assert len(chunks) == 1, "what is there together goes out together"


def test_fields_without_effect_are_taken(client: Any) -> None:
    found = client.chat.completions.create(
        model=NAME, messages=USER, max_tokens=2, user="me", n=1, tools=[], logit_bias={},
        response_format={"type": "text"}, metadata={"a": "b"}, **GREEDY,
    )  # fmt: skip
    assert found.usage.completion_tokens == 2


def test_metrics(base: LLM) -> None:
    with serve(other(base)) as running:
        client = running.client()
        prompt = len(base.tokenizer.encode("the sea")) if base.tokenizer else 0
        client.completions.create(model=NAME, prompt="the sea", max_tokens=8, **GREEDY)
        list(client.completions.create(model=NAME, prompt="the sea", max_tokens=8, stream=True, **GREEDY))
        running.call("GET", "/made/up")
        status, text, headers = running.call("GET", "/metrics")
        assert status == 200
        assert headers["content-type"].startswith("text/plain; version=")
        for name, value in {
            'flashkernel_request_success_total{finished_reason="length"}': 2,
            'flashkernel_request_success_total{finished_reason="error"}': 0,
            "flashkernel_prompt_tokens_total": 2 * prompt,
            "flashkernel_generation_tokens_total": 16,
            "flashkernel_num_requests_running": 0,
            "flashkernel_num_requests_waiting": 0,
            "flashkernel_kv_cache_used_blocks": 0,
            "flashkernel_kv_cache_blocks": 128,
            "flashkernel_time_to_first_token_seconds_count": 2,
            "flashkernel_inter_token_latency_seconds_count": 7,
            "flashkernel_request_time_per_output_token_seconds_count": 2,
            "flashkernel_e2e_request_latency_seconds_count": 2,
            'flashkernel_http_responses_total{path="/v1/completions",status="200"}': 2,
            'flashkernel_http_responses_total{path="other",status="404"}': 1,
        }.items():
            assert running.metric(name) == value, name
        assert "made" not in text
