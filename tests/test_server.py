"""The server, over real sockets, mostly through the real openai client."""

from __future__ import annotations

import asyncio
import builtins
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from typer.testing import CliRunner

openai = pytest.importorskip("openai")
pytest.importorskip("starlette")

from running_server import NAME, Running, comes, other, serve, slow  # noqa: E402

from flashkernel.cli import app as cli  # noqa: E402
from flashkernel.engine import LLM, SamplingParams  # noqa: E402
from flashkernel.engine.server import ServeError, ServerOptions  # noqa: E402
from flashkernel.engine.server.app import Api  # noqa: E402

GREEDY: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}
USER = [{"role": "user", "content": "the sea"}]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """More would only be in each other's way on a model this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / NAME
    tiny_models.save("llama", path)
    return path


@pytest.fixture(scope="module")
def base(folder: Path) -> LLM:
    """The model without a server, whose answers the server's are held against."""
    return LLM(folder, device="cpu", cache_tokens=4096)


@pytest.fixture(scope="module")
def running(base: LLM) -> Iterator[Running]:
    with serve(other(base)) as made:
        yield made


@pytest.fixture(scope="module")
def client(running: Running) -> Any:
    return running.client()


def _expected(base: LLM, prompt: Any, count: int, **more: Any) -> Any:
    return base.generate([prompt], SamplingParams(max_tokens=count, ignore_eos=True, **more))[0]


def test_a_completion_is_what_the_engine_makes(client: Any, base: LLM) -> None:
    done = _expected(base, "the sea and", 20)
    found = client.completions.create(model=NAME, prompt="the sea and", max_tokens=20, **GREEDY)
    assert found.object == "text_completion"
    assert found.model == NAME
    assert [choice.text for choice in found.choices] == [done.text]
    assert found.choices[0].finish_reason == "length"
    assert found.usage.prompt_tokens == len(done.prompt_tokens)
    assert found.usage.completion_tokens == 20
    assert found.usage.total_tokens == len(done.prompt_tokens) + 20
    tokens = client.completions.create(model=NAME, prompt=list(done.prompt_tokens), max_tokens=20, **GREEDY)
    assert tokens.choices[0].text == done.text
    assert tokens.id != found.id
    assert found._request_id == found.id
    short = client.completions.create(model=NAME, prompt="the sea and", **GREEDY)
    assert short.usage.completion_tokens == 16, "OpenAI's default"


def test_several_prompts_in_one_call(client: Any, base: LLM) -> None:
    prompts = ["the sea", "the wind", "sand"]
    expected = [_expected(base, prompt, 9).text for prompt in prompts]
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
        assert found.choices[0].message.content == done.text
        assert found.choices[0].finish_reason == "length"
        assert found.usage.prompt_tokens == len(done.prompt_tokens)
    parts = [{"role": "user", "content": [{"type": "text", "text": "the "}, {"type": "text", "text": "sea"}]}]
    found = client.chat.completions.create(model=NAME, messages=parts, max_tokens=12, **GREEDY)
    assert found.choices[0].message.content == done.text
    whole = client.chat.completions.create(model=NAME, messages=USER, **GREEDY)
    assert whole.usage.total_tokens == base.engine.context, "without a limit it goes on to the end of the context"


def test_streams_say_the_same(client: Any, base: LLM) -> None:
    done = _expected(base, "the sea and", 30)
    chunks = list(client.completions.create(model=NAME, prompt="the sea and", max_tokens=30, stream=True, **GREEDY))
    assert "".join(chunk.choices[0].text for chunk in chunks) == done.text
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
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == done.text
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 30
    assert chunks[-1].usage.prompt_tokens == len(done.prompt_tokens)


def test_a_stream_as_it_looks_on_the_wire(running: Running) -> None:
    body = {"model": NAME, "prompt": "the sea", "max_tokens": 3, "stream": True, "temperature": 0}
    status, text, headers = running.call("POST", "/v1/completions", body)
    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    lines = text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    assert all(json.loads(line.removeprefix("data: "))["object"] == "text_completion" for line in lines[:-2])
    assert text.isascii()


def test_texts_end_at_stop_strings(client: Any, base: LLM) -> None:
    whole = _expected(base, "the sea", 60).text
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
    assert logs.token_logprobs == pytest.approx([one.logprob for one in done.logprobs], abs=1e-4)
    assert logs.tokens == [base.tokenizer.token_text(token) for token in done.tokens]
    assert all(logs.tokens[place] in top for place, top in enumerate(logs.top_logprobs)), "greedy takes the likeliest"
    assert logs.text_offset == [sum(map(len, logs.tokens[:place])) for place in range(5)]

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
    assert client.models.retrieve(NAME).max_model_len == base.engine.context
    assert running.call("GET", "/health")[:2] == (200, {"status": "ok"})


def test_fifty_at_once_on_a_small_pool(base: LLM) -> None:
    llm = other(base, cache_tokens=256, most_sequences=8)
    prompts = [f"the {'sea and the ' * (number % 5)}wind {number}" for number in range(50)]
    counts = [5 + number % 23 for number in range(50)]
    expected = [_expected(base, prompt, count).text for prompt, count in zip(prompts, counts)]

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
        assert running.metric('flashkernel_requests_total{reason="length"}') == 50


def test_a_client_that_leaves_frees_its_pages(base: LLM) -> None:
    with serve(slow(base)) as running:
        client = running.client()
        stream = client.completions.create(model=NAME, prompt="the sea", max_tokens=200, stream=True, **GREEDY)
        next(iter(stream))
        assert running.llm.engine.stats().pages_in_use > 0
        stream.close()
        assert comes(running.idle, 5)
        assert running.metric('flashkernel_requests_total{reason="abort"}') == 1

        connection = running.connection()  # one that waits for the whole answer, and one in the queue behind it
        body = json.dumps({"model": NAME, "prompt": "the sea", "max_tokens": 200, "ignore_eos": True})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        assert comes(lambda: running.llm.engine.stats().running == 1)
        connection.close()
        assert comes(running.idle, 5)
        assert running.llm.engine.stats().generated_tokens < 200
        assert running.metric('flashkernel_requests_total{reason="abort"}') == 2
        text = client.completions.create(model=NAME, prompt="the sea", max_tokens=3, **GREEDY).choices[0].text
        assert text == _expected(base, "the sea", 3).text


def test_an_answer_that_is_there_before_it_is_waited_for(base: LLM) -> None:
    llm = other(base)
    add = llm.engine.add_request
    with serve(llm) as running:

        def lingering(*values: Any, **settings: Any) -> str:
            name = add(*values, **settings)
            assert comes(lambda: not running.api.driver._jobs[name].unfinished)
            return name

        llm.engine.add_request = lingering  # type: ignore[method-assign]
        client, settings = running.client(), {"model": NAME, "prompt": "the sea", "max_tokens": 6, **GREEDY}
        expected = _expected(base, "the sea", 6).text
        assert client.completions.create(**settings).choices[0].text == expected
        chunks = list(client.completions.create(**settings, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == expected
        assert len(chunks) == 1, "what is there together goes out together"


def test_a_client_that_does_not_read(base: LLM) -> None:
    llm = other(base)
    api = Api(llm, ServerOptions(name=NAME, client_timeout=0.2))
    app = api.application()
    sent: list[Any] = []

    async def receive() -> Any:
        if not sent:
            sent.append(None)
            return {"type": "http.request", "body": json.dumps({**_long(), "stream": True}).encode()}
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }  # fmt: skip

    async def call() -> None:
        api.driver.start()
        await asyncio.wait_for(app(scope, receive, send), 20)
        await api.driver.stop()

    asyncio.run(call())
    assert [message["type"] for message in sent[1:]] == ["http.response.start", "http.response.body"]
    assert not llm.engine.busy
    assert llm.engine.stats().pages_in_use == 0


def test_a_full_server_says_when_to_come_again(base: LLM) -> None:
    with serve(slow(base, most_sequences=1), max_queue=1) as running:
        client = running.client()
        settings = {"model": NAME, "prompt": "the sea", "max_tokens": 100, "stream": True, **GREEDY}
        first = client.completions.create(**settings)
        next(iter(first))
        second = threading.Thread(target=lambda: running.call("POST", "/v1/completions", {**_plain(), "max_tokens": 1}))
        second.start()
        assert comes(lambda: running.metric("flashkernel_waiting") == 1)
        with pytest.raises(openai.RateLimitError, match="2 requests already") as refused:
            client.completions.create(**settings)
        assert refused.value.response.headers["retry-after"] == "1"
        assert refused.value.code == "rate_limit_exceeded"
        with pytest.raises(openai.BadRequestError, match="there are 3 prompts; this server takes 2 at once"):
            client.completions.create(model=NAME, prompt=["a", "b", "c"])
        first.close()
        second.join(30)
        assert client.completions.create(model=NAME, prompt="the sea", max_tokens=2).usage.completion_tokens <= 2


def _plain() -> dict[str, Any]:
    return {"model": NAME, "prompt": "the sea", "temperature": 0, "ignore_eos": True}


def test_requests_that_take_too_long(base: LLM) -> None:
    with serve(slow(base), timeout=1.0) as running:
        client = running.client()
        settings = {"model": NAME, "prompt": "the sea", "max_tokens": 200, **GREEDY}
        with pytest.raises(openai.InternalServerError, match=r"not done within 1 s") as late:
            client.completions.create(**settings)
        assert late.value.status_code == 504
        assert comes(running.idle, 5)
        pieces = []
        with pytest.raises(openai.APIError, match=r"not done within 1 s"):
            pieces.extend(client.completions.create(**settings, stream=True))
        assert pieces, "what there was came first"
        assert comes(running.idle, 5)
        assert client.completions.create(model=NAME, prompt="the sea", max_tokens=2, **GREEDY).choices[0].text


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": "hot"}, "temperature is 'hot': input should be a valid number"),
        ({"temperature": -1}, "temperature is -1.0; it must be a number from 0 to 100"),
        ({"top_p": 0}, "top_p is 0"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be a whole number, at least 1"),
        ({"max_tokens": 1.5}, "max_tokens is 1.5: input should be a valid integer"),
        ({"stop": 5}, "stop is 5: input should be a valid string; or stop is 5: input should be a valid array"),
        ({"stop": ["a", 5]}, r"stop\[1\] is 5: input should be a valid string"),
        ({"stop": ""}, "stop is"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": [["a"]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1, 999]}, "token 999 is not in the vocabulary"),
        ({"prompt": ["the sea", ""]}, "the prompt is empty"),
        ({"prompt": [1] * 256}, "the prompt has 256 tokens; the context holds 256"),
        ({"prompt": None}, "prompt is None"),
        ({"logprobs": 99}, "logprobs is 99; it must be a whole number, from 0 to 20"),
        ({"seed": 2**70}, "seed"),
        ({"n": 2}, "n is 2; this server cannot do that"),
        ({"best_of": 2}, "best_of is 2; this server cannot do that"),
        ({"echo": True}, "echo is True; this server cannot do that. Leave it out"),
        ({"suffix": "end"}, "suffix is 'end'; this server cannot do that"),
        ({"stream_options": {"include_usage": True}}, "stream_options are for streams"),
        ({"stream": "yes"}, "stream is 'yes'"),
        ({"extra_body": {"temprature": 1}}, "'temprature' is no field of this request"),
    ],
)
def test_wrong_completions_are_refused(wrong: dict[str, Any], message: str, client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as refused:
        client.completions.create(**{"model": NAME, "prompt": "the sea", **wrong})
    assert refused.value.body["type"] == "invalid_request_error"
    assert set(refused.value.body) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"messages": []}, "at least one"),
        ({"messages": "hello"}, "messages is 'hello': input should be a valid array"),
        ({"messages": [{"content": "no role"}]}, r"messages\[0\].role is .*: field required"),
        ({"messages": [{"role": "user", "content": 5}]}, r"messages\[0\].content is 5"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "'text'"),
        ({"top_logprobs": 2}, "top_logprobs are given and logprobs is not true"),
        ({"logprobs": True, "top_logprobs": 30}, "logprobs is 30"),
        ({"max_tokens": 5, "max_completion_tokens": 5}, "give one of them"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools is .*; this server cannot do that"),
        ({"response_format": {"type": "json_object"}}, "response_format is .*; this server cannot do that"),
        ({"logit_bias": {"5": 1}}, "logit_bias is .*; this server cannot do that"),
    ],
)
def test_wrong_chats_are_refused(wrong: dict[str, Any], message: str, client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        client.chat.completions.create(**{"model": NAME, "messages": USER, **wrong})


def test_fields_without_effect_are_taken(client: Any) -> None:
    found = client.chat.completions.create(
        model=NAME, messages=USER, max_tokens=2, user="me", n=1, tools=[], logit_bias={},
        response_format={"type": "text"}, metadata={"a": "b"}, **GREEDY,
    )  # fmt: skip
    assert found.usage.completion_tokens == 2


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the request is no JSON"),
        (b"{", "the request is no JSON: EOF"),
        (b"\xff\xfe", "the request is no JSON"),
        (b"[" * 10000, "the request is no JSON: recursion limit"),
        (b'{"model": "tiny", "prompt": "\\ud800"}', "the request is no JSON"),
        (b"[]", "the request must be a JSON object"),
        (b"null", "the request must be a JSON object"),
        (b"{}", "model is missing"),
        (b'{"model": "tiny"}', "prompt is missing"),
        (b'{"model": "tiny", "prompt": "a", "temperature": NaN}', "temperature is nan"),
    ],
)
def test_bodies_that_are_no_requests(body: bytes, message: str, running: Running) -> None:
    status, found, _ = running.call("POST", "/v1/completions", body)
    assert status == 400
    assert found["error"]["message"].startswith(message)


def test_other_refusals(client: Any, running: Running) -> None:
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-9' here; this server has 'tiny'") as missing:
        client.completions.create(model="gpt-9", prompt="the sea")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-9'"):
        client.models.retrieve("gpt-9")
    status, found, _ = running.call("GET", "/v1/nothing")
    assert (status, found["error"]["type"]) == (404, "not_found_error")
    status, found, headers = running.call("GET", "/v1/completions")
    assert (status, headers["allow"]) == (405, "POST")
    assert "method not allowed" in found["error"]["message"]
    status, found, _ = running.call("POST", "/v1/completions", _plain(), content_type="text/plain")
    assert (status, found["error"]["message"][:40]) == (415, "the request has the content type 'text/p")


def test_requests_that_are_too_large(base: LLM) -> None:
    with serve(other(base), max_body=1000) as running:
        with pytest.raises(openai.APIStatusError, match="larger than the 1000 bytes") as refused:
            running.client().completions.create(model=NAME, prompt="the sea " * 200)
        assert refused.value.status_code == 413
        connection = running.connection()  # in chunks, which say nothing of the length before
        connection.request(
            "POST", "/v1/completions", iter([b"{" + b" " * 600] * 3), {"content-type": "application/json"},
            encode_chunked=True,
        )  # fmt: skip
        assert connection.getresponse().status == 413
        connection.close()
        assert running.client().completions.create(model=NAME, prompt="the sea", max_tokens=1).choices


def test_clients_that_dawdle(base: LLM) -> None:
    with serve(other(base), client_timeout=0.5) as running:
        begun = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 90\r\n\r\n{"
        )
        with socket.create_connection(("127.0.0.1", running.port), 30) as waiting:
            waiting.sendall(begun)
            assert waiting.recv(4096).startswith(b"HTTP/1.1 408 ")
        with socket.create_connection(("127.0.0.1", running.port), 30) as leaving:
            leaving.sendall(begun)
        assert running.client().completions.create(model=NAME, prompt="the sea", max_tokens=1).choices


def test_a_key_is_asked_for(base: LLM) -> None:
    with serve(other(base), api_key="open-sesame") as running:
        assert running.client(api_key="open-sesame").models.list().data[0].id == NAME
        for call in (
            lambda client: client.models.list(),
            lambda client: client.completions.create(model=NAME, prompt="the sea"),
        ):
            with pytest.raises(openai.AuthenticationError, match="missing or wrong") as refused:
                call(running.client(api_key="guess"))
            assert refused.value.code == "invalid_api_key"
        connection = running.connection()
        for _ in range(2):  # a refused request leaves its connection in order
            connection.request("POST", "/v1/completions", b"x" * 10000, {"content-type": "application/json"})
            response = connection.getresponse()
            assert (response.status, response.headers["www-authenticate"]) == (401, "Bearer")
            response.read()
        connection.close()
        assert running.call("GET", "/metrics")[0] == 401
        assert running.call("GET", "/v1/models", authorization="Basic open-sesame")[0] == 401
        assert running.call("GET", "/health")[0] == 200
        assert running.call("GET", "/metrics", authorization="Bearer open-sesame")[0] == 200


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
            'flashkernel_requests_total{reason="length"}': 2,
            'flashkernel_requests_total{reason="error"}': 0,
            "flashkernel_prompt_tokens_total": 2 * prompt,
            "flashkernel_generated_tokens_total": 16,
            "flashkernel_running": 0,
            "flashkernel_waiting": 0,
            "flashkernel_pages_in_use": 0,
            "flashkernel_pages": 128,
            "flashkernel_time_to_first_token_seconds_count": 2,
            "flashkernel_inter_token_seconds_count": 7,
            "flashkernel_time_per_output_token_seconds_count": 2,
            "flashkernel_request_seconds_count": 2,
            'flashkernel_http_responses_total{path="/v1/completions",status="200"}': 2,
            'flashkernel_http_responses_total{path="other",status="404"}': 1,
        }.items():
            assert running.metric(name) == value, name
        assert "made" not in text


def test_a_failed_step_is_told_and_gone(base: LLM, caplog: pytest.LogCaptureFixture) -> None:
    llm = other(base)
    launch = llm.engine.runner.launch

    def broken(batch: Any) -> Any:
        raise RuntimeError("the device is on fire")

    with serve(llm) as running:
        client = running.client()
        llm.engine.runner.launch = broken  # type: ignore[method-assign]
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError, match="the model failed") as failed:
                client.completions.create(model=NAME, prompt="the sea", stream=stream)
            assert "fire" not in str(failed.value), "what went wrong inside is for the log"
        assert "the device is on fire" in caplog.text
        assert running.call("GET", "/health")[0] == 503
        llm.engine.runner.launch = launch  # type: ignore[method-assign]
        found = client.completions.create(model=NAME, prompt="the sea", max_tokens=5, **GREEDY)
        assert found.choices[0].text == _expected(base, "the sea", 5).text
        assert running.call("GET", "/health")[0] == 200
        assert running.metric('flashkernel_requests_total{reason="error"}') == 2


def test_a_step_that_fails_in_a_stream(base: LLM) -> None:
    llm = other(base)
    launch, steps = llm.engine.runner.launch, []

    def breaking(batch: Any) -> Any:
        steps.append(batch)
        if len(steps) > 6:
            raise RuntimeError("the device is on fire")
        time.sleep(0.02)
        return launch(batch)

    llm.engine.runner.launch = breaking  # type: ignore[method-assign]
    with serve(llm) as running:
        pieces: list[Any] = []
        stream = running.client().completions.create(model=NAME, prompt="the sea", max_tokens=50, stream=True, **GREEDY)
        with pytest.raises(openai.APIError, match="the model failed"):
            pieces.extend(stream)
        assert pieces


def test_an_engine_that_died(base: LLM, caplog: pytest.LogCaptureFixture) -> None:
    llm = other(base)
    with serve(llm) as running:
        step = llm.engine.step
        llm.engine.step = lambda: [][0]  # type: ignore[method-assign, misc]
        for _ in range(2):
            with pytest.raises(openai.InternalServerError, match="out of service") as gone:
                running.client().completions.create(model=NAME, prompt="the sea")
            assert gone.value.status_code == 503
        assert "the engine's thread has ended" in caplog.text
        assert running.call("GET", "/health")[0] == 503
        llm.engine.step = step  # type: ignore[method-assign]
        while llm.engine.busy:
            llm.engine.step()


def test_stopping_lets_requests_finish(base: LLM) -> None:
    with serve(slow(base, 0.01)) as running:
        stream = iter(
            running.client().completions.create(model=NAME, prompt="the sea", max_tokens=60, stream=True, **GREEDY)
        )
        text = next(stream).choices[0].text
        running.server.should_exit = True
        text += "".join(chunk.choices[0].text for chunk in stream)
        assert text == _expected(base, "the sea", 60).text
        running.thread.join(30)
        with pytest.raises(openai.APIConnectionError):
            running.client().models.list()


def test_stopping_ends_requests_after_the_grace(base: LLM) -> None:
    with serve(slow(base, 0.05), grace=0.2) as running:
        client, whole = running.client(), []
        settings = {"model": NAME, "prompt": "the sea", "max_tokens": 200, **GREEDY}
        stream = iter(client.completions.create(**settings, stream=True))
        next(stream)
        waiter = threading.Thread(target=lambda: whole.append(running.call("POST", "/v1/completions", _long())))
        waiter.start()
        assert comes(lambda: running.llm.engine.stats().running == 2)
        running.server.should_exit = True
        with pytest.raises(openai.APIError, match="the server is shutting down"):
            list(stream)
        waiter.join(30)
        assert (whole[0][0], whole[0][1]["error"]["code"]) == (503, "shutting_down")
        running.thread.join(30)
        assert running.idle(), "the pages were given back"


def _long() -> dict[str, Any]:
    return {**_plain(), "max_tokens": 200}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"port": 70000}, "port is 70000; it must be a whole number from 0 to 65535"),
        ({"max_queue": -1}, "max_queue is -1"),
        ({"timeout": 0}, "timeout is 0"),
        ({"grace": float("nan")}, "grace is nan"),
        ({"api_key": ""}, "the API key is empty"),
        ({"api_key": "naïve"}, "the API key is empty or has letters"),
        ({"name": " "}, "the model's name is empty"),
    ],
)
def test_wrong_options_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ServeError, match=message):
        ServerOptions(**wrong)


def test_the_command_refuses_before_it_loads(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(cli, ["serve", str(folder), "--port", port])
    assert result.exit_code == 2
    assert f"127.0.0.1 port {port} cannot be had" in result.stderr
    result = CliRunner().invoke(cli, ["serve", "--port", "0", "--api-key-file", str(tmp_path / "none")])
    assert result.exit_code == 2
    result = CliRunner().invoke(cli, ["serve", str(tmp_path / "nowhere"), "--port", "0"])
    assert result.exit_code == 2
    assert "there is no such model here" in result.stderr
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "uvicorn":
            raise ImportError("no uvicorn", name="uvicorn")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    result = CliRunner().invoke(cli, ["serve", str(folder), "--port", "0"])
    assert result.exit_code == 2
    assert "uvicorn is not installed; run `pip install 'flashkernel[serve]'`" in result.stderr


@pytest.mark.skipif(not hasattr(signal, "SIGINT") or sys.platform == "win32", reason="needs POSIX signals")
def test_the_command_serves_until_it_is_stopped(folder: Path, base: LLM, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("open-sesame\n")
    command = [
        "serve",
        str(folder),
        "--port",
        "0",
        "--api-key-file",
        str(key),
        "--device",
        "cpu",
        "--max-requests",
        "2",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "flashkernel", *command], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        # A shell that starts tests in the background has its children ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        found = re.fullmatch(r"Serving tiny at (http://127\.0\.0\.1:\d+/v1) \(Ctrl-C stops\)\n", line)
        assert found, line
        with openai.OpenAI(base_url=found[1], api_key="open-sesame", max_retries=0) as client:
            text = client.completions.create(model=NAME, prompt="the sea", max_tokens=5, **GREEDY).choices[0].text
        assert text == _expected(base, "the sea", 5).text
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
        assert process.returncode == 130
        assert out == ""
        assert '"POST /v1/completions HTTP/1.1" 200' in err
        assert "Traceback" not in err
    finally:
        process.kill()
        process.wait(10)
