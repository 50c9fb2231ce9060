"""What the server refuses: wrong requests, strangers, more than it can take, and options that make no server."""

from __future__ import annotations

import builtins
import json
import re
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

openai = pytest.importorskip("openai")
pytest.importorskip("starlette")

from running_server import NAME, Running, comes, other, serve, slow  # noqa: E402
from served_model import (  # noqa: E402, F401
    GREEDY,
    USER,
    _one_thread,
    _plain,
    base_fixture,
    client_fixture,
    folder_fixture,
    running_fixture,
)

from flashkernel.cli import app as cli  # noqa: E402
from flashkernel.engine import LLM  # noqa: E402
from flashkernel.engine.server import ServeError, ServerArgs  # noqa: E402
from flashkernel.engine.server.protocol import ChatRequest, CompletionRequest, GenerationRequest  # noqa: E402
from flashkernel.engine.server.responses import ResponsesRequest  # noqa: E402


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
        ({"prompt": [1, 2**40], "echo": True}, "token 1099511627776 is not in the vocabulary"),
        ({"prompt": [-1], "echo": True}, "token -1 is not in the vocabulary"),
        ({"prompt": ["the sea", ""]}, "the prompt is empty"),
        ({"prompt": [1] * 256}, "it has 256 tokens. This model's maximum context length is 256 tokens"),
        ({"prompt": None}, "prompt is None"),
        ({"logprobs": 99}, "logprobs is 99; it must be a whole number, from 0 to 20"),
        ({"seed": 2**70}, "seed"),
        ({"n": 0}, "n is 0; it must be a whole number, from 1 to 128"),
        ({"logit_bias": {"five": 1}}, "its keys are token ids"),
        ({"logit_bias": {"9" * 5000: 1}}, "its keys are token ids"),
        ({"logit_bias": {"9999": 1}}, "logit_bias names token 9999"),
        ({"extra_body": {"min_tokens": 99, "max_tokens": 5}}, "min_tokens is 99"),
        ({"best_of": 2}, "best_of is 2; this server cannot do that"),
        ({"echo": "yes"}, "echo is 'yes'"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"extra_body": {"prompt_logprobs": 21}}, "prompt_logprobs is 21"),
        ({"extra_body": {"prompt_logprobs": 1, "stream": True}}, "prompt_logprobs come with whole responses"),
        ({"suffix": "end"}, "suffix is 'end'; this server cannot do that"),
        ({"stream_options": {"include_usage": True}}, "stream_options are for streams"),
        ({"stream": "yes"}, "stream is 'yes'"),
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
        ({"tools": [{"type": "function"}]}, r"tools\[0\].function is .*: field required"),
        ({"tool_choice": "required"}, "tool_choice asks for a tool that `tools` does not have"),
        ({"response_format": {"type": "json_schema"}}, "no json_schema"),
        ({"response_format": {"type": "poem"}}, "response_format"),
        *(
            ({"extra_body": {"chat_template_kwargs": {name: []}}}, f"chat_template_kwargs has '{name}', which is not")
            for name in ("messages", "self")
        ),
    ],
)
def test_wrong_chats_are_refused(wrong: dict[str, Any], message: str, client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        client.chat.completions.create(**{"model": NAME, "messages": USER, **wrong})


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


def test_a_full_server_says_when_to_come_again(base: LLM) -> None:
    with serve(slow(base, 0.05, max_num_seqs=1), max_queue=1) as running:
        client = running.client()
        settings = {"model": NAME, "prompt": "the sea", "max_tokens": 200, "stream": True, **GREEDY}
        first = client.completions.create(**settings)
        next(iter(first))
        second = threading.Thread(target=lambda: running.call("POST", "/v1/completions", {**_plain(), "max_tokens": 1}))
        second.start()
        assert comes(lambda: running.metric("flashkernel_num_requests_waiting") == 1)
        with pytest.raises(openai.RateLimitError, match="2 requests already") as refused:
            client.completions.create(**settings)
        assert refused.value.response.headers["retry-after"] == "1"
        assert refused.value.code == "rate_limit_exceeded"
        with pytest.raises(openai.BadRequestError, match="there are 3 prompts; this server takes 2 at once"):
            client.completions.create(model=NAME, prompt=["a", "b", "c"])
        first.close()
        second.join(30)
        assert client.completions.create(model=NAME, prompt="the sea", max_tokens=2).usage.completion_tokens <= 2


def test_a_small_request_for_a_multitude(base: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Millions of choices are refused before anything is made for each of them."""
    body = {**_plain(), "prompt": [[1]] * 4000, "n": 128}
    with serve(other(base), max_queue=8) as running:
        monkeypatch.setattr(CompletionRequest, "sampling_params", lambda request: pytest.fail("too late"))
        status, found, _ = running.call("POST", "/v1/completions", body)
        assert status == 400
        assert "there are 512000 prompts; this server takes" in found["error"]["message"]
        assert running.call("GET", "/health")[0] == 200


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


@pytest.mark.parametrize("content_type", ["application/json", "text/plain"])
def test_a_refused_client_may_finish_sending(content_type: str, base: LLM) -> None:
    """More than the socket holds is still on its way when the answer is decided: the client gets to read it."""
    with serve(other(base), max_body=1000) as running:
        status, found, headers = running.call("POST", "/v1/completions", b" " * 2**24, content_type=content_type)
        assert status == (413 if content_type == "application/json" else 415)
        assert found["error"]["message"]
        assert headers["connection"] == "close"


def _begun(length: int) -> bytes:
    """A request that says how long it is, and its first byte."""
    head = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {length}"]
    return "\r\n".join([*head, "", "{"]).encode()


def test_a_client_that_never_finishes_is_cut_off(base: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashkernel.engine.server.api_server.LINGER_S", 0.2)
    with (
        serve(other(base), max_body=1000) as running,
        socket.create_connection(("127.0.0.1", running.port), 30) as waiting,
    ):
        waiting.sendall(_begun(9000))
        answer = b""
        while more := waiting.recv(4096):  # until the server closes
            answer += more
        assert answer.startswith(b"HTTP/1.1 413 ")


def test_clients_that_dawdle(base: LLM) -> None:
    with serve(other(base), client_timeout=1.5) as running:
        with socket.create_connection(("127.0.0.1", running.port), 30) as waiting:
            waiting.sendall(_begun(90))
            assert waiting.recv(4096).startswith(b"HTTP/1.1 408 ")
        with socket.create_connection(("127.0.0.1", running.port), 30) as leaving:
            leaving.sendall(_begun(90))
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


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"port": 70000}, "port is 70000; it must be a whole number from 0 to 65535"),
        ({"max_queue": -1}, "max_queue is -1"),
        ({"timeout": 0}, "timeout is 0"),
        ({"grace": float("nan")}, "grace is nan"),
        ({"api_key": ""}, "the API key is empty"),
        ({"api_key": "naïve"}, "the API key is empty or has letters"),
        ({"served_model_name": " "}, "served_model_name is empty"),
    ],
)
def test_wrong_options_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ServeError, match=message):
        ServerArgs(**wrong)


def test_the_command_refuses_before_it_loads(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(cli, ["serve", str(folder), "--port", port])
    assert result.exit_code == 2
    assert f"127.0.0.1 port {port} cannot be bound" in result.stderr
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


ANYTHING = [
    None, True, 0, 1, -1, 2**31, 2**64, 10**30, 0.5, -0.0, 1e308, 1e-320, "", "a", "\x00", "\N{GRINNING FACE}" * 50,
    [], [None], [1], [-1], [""], [[]], [[1], ["a"]], ["a"] * 300, {}, {"a": 1}, {"1": 1e9}, {"99999999": 1},
    {"type": "json_schema", "json_schema": {"schema": {"type": "nope"}}},
    {"type": "regex", "regex": "(a*)*b{1,100000}"},
    {"type": "function", "function": {"name": "f", "parameters": {"type": "nope"}}},
    [{"type": "function", "function": {"name": "f"}}], [{"role": "x" * 300, "content": [{"type": "text", "text": ""}]}],
]  # fmt: skip
SOUND: dict[str, tuple[type[GenerationRequest], dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, {"prompt": "the sea", "max_tokens": 1}),
    "/v1/chat/completions": (ChatRequest, {"messages": USER, "max_tokens": 1}),
    "/v1/responses": (ResponsesRequest, {"input": "the sea", "max_output_tokens": 1}),
}


@pytest.mark.parametrize("path", SOUND)
def test_a_field_may_have_any_value(path: str, running: Running) -> None:
    """It is taken or refused, and a refusal names no class of this program; nothing fails."""
    kind, sound = SOUND[path]
    for name in (*kind.model_fields, "suffix", "audio"):
        if name == "n":
            continue  # 128 choices of each value that is a number
        for value in ANYTHING:
            status, found, _ = running.call("POST", path, {"model": NAME, **sound, name: value})
            assert status in (200, 400, 404), (name, value, found)
            if status == 400:
                message = found["error"]["message"]
                assert message
                assert len(message) < 600
                assert not re.search("NamedTool|FunctionName|TextPart|InputItem", message), message
    number = json.dumps({"model": NAME, **sound, "seed": 7}).replace("7", "7" * 5000)
    assert running.call("POST", path, number.encode())[0] == 400
    assert running.call("GET", "/health")[0] == 200
