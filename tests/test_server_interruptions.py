"""Requests that end early: clients that leave or do not read, time limits, failed steps, and a server that stops."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("starlette")

from running_server import NAME, api_of, comes, other, serve, serve_command, slow  # noqa: E402
from served_model import GREEDY, USER, _expected, _one_thread, _plain, base_fixture, folder_fixture  # noqa: E402, F401

from flashkernel.engine import LLM  # noqa: E402
from flashkernel.engine import server as serving  # noqa: E402
from flashkernel.engine.server import ServerArgs, formatters, launcher, protocol  # noqa: E402
from flashkernel.engine.server.api_server import ApiServer  # noqa: E402


def _long() -> dict[str, Any]:
    return {**_plain(), "max_tokens": 200}


def test_a_client_that_leaves_frees_its_pages(base: LLM) -> None:
    with serve(slow(base, 0.05)) as running:
        client = running.client()
        stream = client.completions.create(model=NAME, prompt="the sea", max_tokens=200, stream=True, **GREEDY)
        next(iter(stream))
        assert running.llm.engine.stats().num_used_blocks > 0
        stream.close()
        assert comes(running.idle)
        assert running.metric('flashkernel_request_success_total{finished_reason="abort"}') == 1

        connection = running.connection()  # one that waits for the whole answer, and one in the queue behind it
        body = json.dumps({"model": NAME, "prompt": "the sea", "max_tokens": 200, "ignore_eos": True})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        assert comes(lambda: running.llm.engine.stats().num_running == 1)
        connection.close()
        assert comes(running.idle)
        assert running.llm.engine.stats().generation_tokens < 200
        assert running.metric('flashkernel_request_success_total{finished_reason="abort"}') == 2
        text = client.completions.create(model=NAME, prompt="the sea", max_tokens=3, **GREEDY).choices[0].text
        assert text == _expected(base, "the sea", 3).outputs[0].text


async def _call(api: ApiServer, path: str, body: dict[str, Any], send: Any) -> None:
    """A call of the application without a network; the client stays until the response has ended."""
    messages = iter([{"type": "http.request", "body": json.dumps(body).encode()}])

    async def receive() -> Any:
        for message in messages:
            return message
        await asyncio.Event().wait()

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
    await asyncio.wait_for(api.application()(scope, receive, send), 20)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_does_not_read(base: LLM, stream: bool) -> None:
    llm = other(base)
    api, engine = api_of(llm, ServerArgs(served_model_name=NAME, client_timeout=1.0))
    sent: list[str] = []

    async def send(message: Any) -> None:
        sent.append(message["type"])
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def call() -> None:
        await engine.start()
        await _call(api, "/v1/completions", {**_long(), "stream": stream}, send)
        await engine.stop()

    asyncio.run(call())
    assert sent == ["http.response.start", "http.response.body"]
    assert not llm.engine.has_unfinished_requests()
    assert llm.engine.stats().num_used_blocks == 0
    assert not engine._sinks, "it takes no place from others"


@pytest.mark.parametrize(
    ("path", "limit", "said"),
    [
        ("/v1/completions", "max_tokens", {"prompt": "the sea"}),
        ("/v1/chat/completions", "max_tokens", {"messages": USER}),
        ("/v1/responses", "max_output_tokens", {"input": "the sea"}),
    ],
)
def test_a_streamed_token_costs_little(
    base: LLM, monkeypatch: pytest.MonkeyPatch, path: str, limit: str, said: dict[str, Any]
) -> None:
    """Timers, parsers and events with their fields are made once for a stream, whatever its length."""
    counts: dict[str, int] = {}

    def count(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def counting(*given: Any, **named: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            return original(*given, **named)

        monkeypatch.setattr(owner, name, counting)

    count(asyncio.BaseEventLoop, "call_at")
    count(protocol.ChatRequest, "parser")
    count(formatters.ResponseFormatter, "_object")
    count(formatters, "server_sent_event")
    llm = other(base)
    api, engine = api_of(llm, ServerArgs(served_model_name=NAME))
    step, deliver, under_way = llm.engine.step, engine._deliver, threading.Semaphore(0)

    def step_once_read() -> Any:
        """However busy the machine is, no event has two tokens."""
        outputs = step()
        if outputs:
            engine._call(deliver, outputs, time.monotonic())
            engine._call(under_way.release)
            under_way.acquire()
        while any(sink._outputs for sink in list(engine._sinks.values())):
            time.sleep(0.0005)
        return []

    llm.engine.step = step_once_read  # type: ignore[method-assign]

    async def send(message: Any) -> None:
        assert message["type"] != "http.response.start" or message["status"] == 200
        sent.append(message)

    async def calls() -> None:
        nonlocal sent
        await engine.start()
        for tokens in (8, 120):
            counts.clear()
            sent = []
            body = {"model": NAME, **said, limit: tokens, "ignore_eos": True, "stream": True}
            await _call(api, path, body, send)
            found.append((len(sent), dict(counts)))
        await engine.stop()

    sent: list[Any] = []
    found: list[tuple[int, dict[str, int]]] = []
    asyncio.run(calls())
    (few, first), (many, second) = found
    assert many > few, "more is said"
    assert first == second


def test_requests_that_take_too_long(base: LLM) -> None:
    with serve(slow(base), timeout=2.0) as running:
        client = running.client()
        settings = {"model": NAME, "prompt": "the sea", "max_tokens": 200, **GREEDY}
        with pytest.raises(openai.InternalServerError, match=r"not done within 2 s") as late:
            client.completions.create(**settings)
        assert late.value.status_code == 504
        assert comes(running.idle)
        pieces = []
        with pytest.raises(openai.APIError, match=r"not done within 2 s"):
            pieces.extend(client.completions.create(**settings, stream=True))
        assert pieces, "what there was came first"
        assert comes(running.idle)
        assert client.completions.create(model=NAME, prompt="the sea", max_tokens=2, **GREEDY).choices[0].text


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
        assert found.choices[0].text == _expected(base, "the sea", 5).outputs[0].text
        assert running.call("GET", "/health")[0] == 200
        assert running.metric('flashkernel_request_success_total{finished_reason="error"}') == 2


def test_logits_that_are_nan_are_told(base: LLM, caplog: pytest.LogCaptureFixture) -> None:
    """The call is an error; the engine is well, and so are other calls."""
    llm = other(base)
    sample_of = llm.engine.runner._compute

    def spoiled(*given: Any) -> Any:
        found = sample_of(*given)
        return found._replace(token_ids=found.token_ids * 0 - 1)

    with serve(llm) as running:
        client = running.client()
        llm.engine.runner._compute = spoiled  # type: ignore[method-assign]
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError, match="the model failed"):
                client.completions.create(model=NAME, prompt="the sea", stream=stream)
        assert "logits are NaN" in caplog.text
        assert running.call("GET", "/health")[0] == 200
        llm.engine.runner._compute = sample_of  # type: ignore[method-assign]
        found = client.completions.create(model=NAME, prompt="the sea", max_tokens=5, **GREEDY)
        assert found.choices[0].text == _expected(base, "the sea", 5).outputs[0].text
        assert running.metric('flashkernel_request_success_total{finished_reason="error"}') == 2


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


def test_the_event_loop_and_the_engine_take_turns(base: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's lock changes hands within a step, and afterwards as before."""
    found: list[float] = []
    monkeypatch.setattr(launcher.Server, "run", lambda self, sockets: found.append(sys.getswitchinterval()))
    before = sys.getswitchinterval()
    args = ServerArgs(port=0)
    launcher.run(base, args, serving.bind(args), print)
    assert found[0] <= 0.001 < before == sys.getswitchinterval()


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
        while llm.engine.has_unfinished_requests():
            llm.engine.step()


def test_stopping_lets_requests_finish(base: LLM) -> None:
    with serve(slow(base, 0.01)) as running:
        stream = iter(
            running.client().completions.create(model=NAME, prompt="the sea", max_tokens=60, stream=True, **GREEDY)
        )
        text = next(stream).choices[0].text
        running.server.should_exit = True
        text += "".join(chunk.choices[0].text for chunk in stream)
        assert text == _expected(base, "the sea", 60).outputs[0].text
        running.thread.join(30)
        with pytest.raises(openai.APIConnectionError):
            running.client().models.list()


def test_a_request_that_arrives_while_the_server_stops(base: LLM) -> None:
    """Its connection was there before, so it is answered: with status 503, however much grace is left."""
    body = json.dumps({**_plain(), "max_tokens": 3}).encode()
    with serve(slow(base), grace=30.0) as running:
        running_one = threading.Thread(
            target=lambda: running.call("POST", "/v1/completions", {**_plain(), "max_tokens": 60})
        )
        running_one.start()
        assert comes(lambda: running.llm.engine.stats().num_running == 1)
        late = running.connection()
        late.putrequest("POST", "/v1/completions")
        late.putheader("content-type", "application/json")
        late.putheader("content-length", str(len(body)))
        late.endheaders(body[:5])
        threading.Event().wait(0.2)
        running.server.should_exit = True
        assert comes(lambda: running.engine._draining)
        late.send(body[5:])
        answer = late.getresponse()
        assert (answer.status, json.loads(answer.read())["error"]["code"]) == (503, "shutting_down")
        assert answer.headers["retry-after"]
        late.close()
        running_one.join(30)
        running.thread.join(30)


def test_stopping_ends_requests_after_the_grace(base: LLM) -> None:
    with serve(slow(base, 0.05), grace=0.2) as running:
        client, whole = running.client(), []
        settings = {"model": NAME, "prompt": "the sea", "max_tokens": 200, **GREEDY}
        stream = iter(client.completions.create(**settings, stream=True))
        next(stream)
        waiter = threading.Thread(target=lambda: whole.append(running.call("POST", "/v1/completions", _long())))
        waiter.start()
        assert comes(lambda: running.llm.engine.stats().num_running == 2)
        running.server.should_exit = True
        with pytest.raises(openai.APIError, match="the server is shutting down"):
            list(stream)
        waiter.join(30)
        assert (whole[0][0], whole[0][1]["error"]["code"]) == (503, "shutting_down")
        running.thread.join(30)
        assert running.idle(), "the pages were given back"


@pytest.mark.skipif(not hasattr(signal, "SIGINT") or sys.platform == "win32", reason="needs POSIX signals")
def test_the_command_serves_until_it_is_stopped(folder: Path, base: LLM, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("open-sesame\n")
    with serve_command(folder, "--api-key-file", str(key), "--max-num-seqs", "2") as (process, url):
        with openai.OpenAI(base_url=url, api_key="open-sesame", max_retries=0) as client:
            text = client.completions.create(model=NAME, prompt="the sea", max_tokens=5, **GREEDY).choices[0].text
        assert text == _expected(base, "the sea", 5).outputs[0].text
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 130
        assert out == ""
        assert '"POST /v1/completions HTTP/1.1" 200' in err
        assert "Traceback" not in err
