"""The server with the API in processes of its own: clients see the same, and no process takes others with it."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("starlette")

from running_server import NAME, Running, comes, other, serve, serve_command, slow  # noqa: E402
from served_model import (  # noqa: E402, F401
    GREEDY,
    USER,
    _expected,
    _one_thread,
    _plain,
    base_fixture,
    client_fixture,
    folder_fixture,
)

from flashkernel.engine import LLM, SamplingParams  # noqa: E402
from flashkernel.engine import server as serving  # noqa: E402
from flashkernel.engine.server import ServeError, ServerArgs, errors, multi_process  # noqa: E402
from flashkernel.engine.server.async_engine import AsyncEngine  # noqa: E402
from flashkernel.engine.server.connection import Connection  # noqa: E402
from flashkernel.engine.server.engine_client import EngineRequest  # noqa: E402

pytestmark = pytest.mark.skipif(os.name != "posix", reason="processes share sockets on POSIX systems alone")
COUNT = 2


@pytest.fixture(scope="module", name="running")
def running_fixture(base: LLM) -> Iterator[Running]:
    with serve(other(base), api_server_count=COUNT) as made:
        yield made


@pytest.fixture(scope="module", name="slow_running")
def slow_running_fixture(base: LLM) -> Iterator[Running]:
    with serve(slow(base, 0.02), api_server_count=COUNT) as made:
        yield made


def _children(running: Running) -> list[multi_process.Child]:
    assert isinstance(running.server, multi_process.MultiProcessServer)
    return running.server._processes.children


def _long(running: Running, count: int, **more: Any) -> list[Any]:
    """Streams that have begun, each of a connection of its own."""
    streams = []
    for _ in range(count):
        options = {"model": NAME, "prompt": "the sea", "max_tokens": 200, "stream": True, **GREEDY, **more}
        streams.append(running.client().completions.create(**options))
        next(iter(streams[-1]))
    return streams


def test_texts_are_what_the_engine_makes(running: Running, base: LLM) -> None:
    """Whole and streamed, of texts and tokens, chats, several choices; by either process."""
    client = running.client()
    done = _expected(base, "the sea and", 20)
    settings = {"model": NAME, "max_tokens": 20, **GREEDY}
    for prompt in ("the sea and", list(done.prompt_token_ids)):
        for _ in range(2 * COUNT):
            with running.client() as one:  # a connection of its own
                found = one.completions.create(prompt=prompt, **settings)
            assert (found.choices[0].text, found.usage.completion_tokens) == (done.outputs[0].text, 20)
            assert found.usage.prompt_tokens == len(done.prompt_token_ids)
        chunks = list(client.completions.create(prompt=prompt, stream=True, **settings))
        assert "".join(chunk.choices[0].text for chunk in chunks) == done.outputs[0].text
        assert chunks[-1].choices[0].finish_reason == "length"
    chat = client.chat.completions.create(model=NAME, messages=USER, max_tokens=12, **GREEDY)
    assert (
        chat.choices[0].message.content
        == base.chat(USER, SamplingParams(max_tokens=12, ignore_eos=True)).outputs[0].text
    )
    prompts = ["the sea", "the wind"]
    found = client.completions.create(model=NAME, prompt=prompts, max_tokens=9, n=2, echo=True, logprobs=2, **GREEDY)
    expected = [prompt + _expected(base, prompt, 9).outputs[0].text for prompt in prompts for _ in range(2)]
    assert [choice.text for choice in found.choices] == expected
    assert all(len(choice.logprobs.tokens) > 9 for choice in found.choices)


def test_structured_outputs(running: Running) -> None:
    pytest.importorskip("llguidance")
    wanted = {"type": "regex", "regex": "(wind|sea){1,4}"}
    found = running.client().chat.completions.create(
        model=NAME, messages=USER, extra_body={"response_format": wanted}, logprobs=True, top_logprobs=2
    )
    assert re.fullmatch("(wind|sea){1,4}", found.choices[0].message.content)
    assert found.choices[0].logprobs.content[0].top_logprobs


@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        ({"prompt": [7] * 4096}, 400, "the prompt is too long"),
        ({"prompt": [10**6]}, 400, "not in the vocabulary"),
        ({"prompt": ""}, 400, "the prompt is empty"),
        ({"top_p": 7.0}, 400, "top_p is 7.0"),
        ({"model": "another"}, 404, "there is no model 'another'"),
    ],
)
def test_errors_say_the_same(running: Running, base: LLM, change: dict[str, Any], status: int, said: str) -> None:
    """Whichever process finds them; the connection to the engine goes on."""
    with serve(other(base)) as alone:
        expected = alone.call("POST", "/v1/completions", {**_plain(), **change})[:2]
    found = running.call("POST", "/v1/completions", {**_plain(), **change})[:2]
    assert found == expected
    assert (found[0], said in found[1]["error"]["message"]) == (status, True)
    assert running.call("POST", "/v1/completions", {**_plain(), **change, "stream": True})[:2] == expected


def test_metrics_and_health_are_those_of_all(running: Running) -> None:
    names = (
        'flashkernel_request_success_total{finished_reason="length"}',
        'flashkernel_http_responses_total{path="/v1/completions",status="200"}',
        "flashkernel_generation_tokens_total",
    )
    assert _call(running, 1)[0] == 200
    before = [running.metric(name) for name in names]
    for _ in range(6):
        assert _call(running, 3)[0] == 200
    assert comes(lambda: [running.metric(name) - old for name, old in zip(names, before)] == [6, 6, 18])
    assert running.call("GET", "/health")[:2] == (200, {"status": "ok"})
    assert running.call("GET", "/v1/models")[1]["data"][0]["id"] == NAME


def test_the_limits_are_those_of_all(base: LLM) -> None:
    """Requests run and wait together, whichever process they came through; time limits too."""
    llm = slow(base, 0.04, max_num_seqs=2)
    with serve(llm, api_server_count=COUNT, max_queue=1, timeout=4.0) as running:
        waiting = [threading.Thread(target=lambda: found.append(_call(running, 200))) for _ in range(3)]
        found: list[Any] = []
        for thread in waiting:
            thread.start()
        assert comes(lambda: llm.engine.stats().num_running + llm.engine.stats().num_waiting == 3)
        status, body, headers = running.call("POST", "/v1/completions", {**_plain(), "max_tokens": 3})
        assert (status, body["error"]["code"], headers["retry-after"]) == (429, "rate_limit_exceeded", "1")
        for thread in waiting:
            thread.join(60)
        assert {status for status, _ in found} <= {200, 504}
        assert 504 in {status for status, _ in found}, "three answers of 200 tokens take longer than 4 s"


def _call(running: Running, tokens: int) -> tuple[int, Any]:
    return running.call("POST", "/v1/completions", {**_plain(), "max_tokens": tokens})[:2]


def test_a_client_that_leaves_frees_its_pages(slow_running: Running) -> None:
    running, engine = slow_running, slow_running.llm.engine
    streams = _long(running, 2 * COUNT)
    assert engine.stats().num_used_blocks > 0
    for stream in streams:
        stream.close()
    connection = running.connection()
    body = json.dumps({**_plain(), "max_tokens": 200})
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    assert comes(lambda: engine.stats().num_running >= 1)
    connection.close()
    assert comes(running.idle)
    assert engine.stats().generation_tokens < 2 * COUNT * 200
    assert comes(lambda: not running.engine._sinks)


@pytest.mark.parametrize("how", ["leave", "lost"])
def test_a_client_that_leaves_before_its_request_is_begun(base: LLM, how: str) -> None:
    """A busy engine's process reads both messages in one piece."""
    llm = slow(base, 0.02)

    async def call() -> None:
        engine = AsyncEngine(llm.engine, 8)
        await engine.start()
        client = multi_process.ApiClient(engine, SimpleNamespace())  # type: ignore[arg-type]
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        client._on_add([EngineRequest("cmpl-1-0", [1, 2], params, True)], 60.0)
        if how == "leave":
            client._on_leave("cmpl-1-0")
        else:
            client._on_lost()
        await asyncio.wait_for(asyncio.gather(*client._calls), 30)
        assert not client._sinks
        await engine.stop()

    asyncio.run(call())
    assert not llm.engine.has_unfinished_requests()
    assert llm.engine.stats().generation_tokens < 100


def test_a_process_that_ends_takes_its_own_requests_alone(
    slow_running: Running, base: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    """Its requests are aborted, the others finish, and another process takes its place."""
    running, children = slow_running, _children(slow_running)
    texts: list[str] = []
    threads = []
    for _ in range(8):
        threads.append(threading.Thread(target=lambda: texts.append(_whole_or_error(running))))
        threads[-1].start()
    assert comes(lambda: running.llm.engine.stats().num_running == 8)
    before = children[0].process
    before.kill()
    for thread in threads:
        thread.join(60)
    expected = _expected(base, "the sea", 60).outputs[0].text
    assert set(texts) <= {expected, "error"}
    assert comes(running.idle)
    assert comes(lambda: children[0].process is not before)
    assert "ended with exit code -9; another is started" in caplog.text
    assert isinstance(running.server, multi_process.MultiProcessServer)
    assert comes(lambda: all(client.ready for client in running.server._clients))
    for _ in range(2 * COUNT):
        assert _call(running, 3)[0] == 200


def test_a_process_that_cannot_be_replaced(
    base: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The others go on serving."""
    popen = subprocess.Popen
    with serve(other(base), api_server_count=COUNT) as running:
        monkeypatch.setattr(
            multi_process.subprocess, "Popen", lambda command, **more: popen([sys.executable, "-c", "exit(3)"], **more)
        )
        _children(running)[0].process.kill()
        assert comes(lambda: "exit code 3 before it could serve" in caplog.text)
        for _ in range(3):
            assert _call(running, 3)[0] == 200
        assert caplog.text.count("exit code 3") == 1


def _whole_or_error(running: Running) -> str:
    try:
        return running.call("POST", "/v1/completions", {**_plain(), "max_tokens": 60})[1]["choices"][0]["text"]
    except OSError:  # the process ended
        return "error"


def test_a_failed_step_and_an_engine_that_died(base: LLM, caplog: pytest.LogCaptureFixture) -> None:
    llm = other(base)
    launch, step = llm.engine.runner.launch, llm.engine.step

    def broken(batch: Any) -> Any:
        raise RuntimeError("the device is on fire")

    with serve(llm, api_server_count=1) as running:
        llm.engine.runner.launch = broken  # type: ignore[method-assign]
        status, body = _call(running, 5)
        assert (status, "the model failed" in body["error"]["message"]) == (500, True)
        assert running.call("GET", "/health")[0] == 503
        llm.engine.runner.launch = launch  # type: ignore[method-assign]
        assert _call(running, 5)[1]["choices"][0]["text"] == _expected(base, "the sea", 5).outputs[0].text
        assert running.call("GET", "/health")[0] == 200
        llm.engine.step = lambda: [][0]  # type: ignore[method-assign, misc]
        for _ in range(2):
            status, body = _call(running, 5)
            assert (status, "out of service" in body["error"]["message"]) == (503, True)
        assert running.call("GET", "/health")[0] == 503
        llm.engine.step = step  # type: ignore[method-assign]
        while llm.engine.has_unfinished_requests():
            llm.engine.step()


@pytest.mark.parametrize("grace", [30.0, 0.2])
def test_stopping(base: LLM, grace: float) -> None:
    """Requests finish within the grace, and the others get status 503; nobody else is let in."""
    with serve(slow(base, 0.02), api_server_count=1, grace=grace) as running:
        (stream,) = _long(running, 1, max_tokens=60)
        running.server.should_exit = True
        if grace > 1:
            text = "".join(chunk.choices[0].text for chunk in stream)
            assert _expected(base, "the sea", 60).outputs[0].text.endswith(text)
            assert text
        else:
            with pytest.raises(openai.APIError, match="the server is shutting down"):
                list(stream)
        running.thread.join(30)
        assert [child.process.poll() for child in _children(running)] == [0]
        with pytest.raises(openai.APIConnectionError):
            running.client().models.list()


def test_many_requests_at_once(running: Running, base: LLM) -> None:
    """Each gets its own text, and both processes serve."""
    prompts = ["the sea", "the wind and the sand", "shore", "and the island of the sea"]
    expected = [_expected(base, prompt, 11).outputs[0].text for prompt in prompts]

    async def ask(client: Any, number: int) -> str:
        options: dict[str, Any] = {"model": NAME, "prompt": prompts[number % 4], "max_tokens": 11, **GREEDY}
        if number % 3:
            return (await client.completions.create(**options)).choices[0].text
        stream = await client.completions.create(**options, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=running.url, api_key="none", max_retries=0, timeout=60) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(80)))

    used = [_cpu_seconds(child.process.pid) for child in _children(running)]
    assert asyncio.run(ask_all()) == [expected[number % 4] for number in range(80)]
    if Path("/proc/self/stat").exists():
        later = [_cpu_seconds(child.process.pid) for child in _children(running)]
        assert all(after > before for before, after in zip(used, later)), "connections are spread over processes"


def _cpu_seconds(pid: int) -> float:
    stat = Path(f"/proc/{pid}/stat")
    if not stat.exists():
        return 0.0
    fields = stat.read_text().rsplit(")", 1)[1].split()
    return float(fields[11]) + float(fields[12])


def test_messages_in_pieces_and_many_at_once() -> None:
    """However the bytes come, each message comes once and in order; one that fails does not stop the others."""
    got: list[Any] = []

    def take(value: Any) -> None:
        if value == "bad":
            raise KeyError(value)
        got.append(value)

    sent = [1, "bad", "x" * 200_000, [EngineRequest("a", [1, 2], SamplingParams(seed=3, stop="x"), True)], None]

    async def run() -> None:
        ours, theirs = socket.socketpair()
        lost = asyncio.Event()
        receiver, sender = Connection({"take": take}, lambda: None), Connection({}, lost.set)
        await receiver.open(ours)
        await sender.open(theirs)
        for value in sent:
            sender.send("take", value)
        while len(got) < len(sent) - 1:
            await asyncio.sleep(0.01)
        receiver.close()
        await asyncio.wait_for(lost.wait(), 5)
        sender.send("take", 1)  # nobody reads it
        assert not sender.is_open
        pieces = Connection({"take": take}, lambda: None)
        body = pickle.dumps(("take", "again"))
        for byte in len(body).to_bytes(8, "little") + body:
            pieces.data_received(bytes([byte]))

    asyncio.run(run())
    assert got == [one for one in sent if one != "bad"] + ["again"]


def test_errors_survive_the_way() -> None:
    for error in (errors.too_many_requests(3), errors.bad_request("no", "prompt"), errors.prompt_too_long(9, 8)):
        again = pickle.loads(pickle.dumps(error))
        assert (again.status, again.body(), again.headers) == (error.status, error.body(), error.headers)
        assert str(again) == str(error)


def test_how_many_processes_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert multi_process.default_count("cpu") == 0
    for cores, expected in ((1, 1), (2, 1), (8, 2), (16, 4), (128, 4)):
        monkeypatch.setattr(multi_process, "num_cores", lambda cores=cores: cores)
        assert multi_process.default_count("cuda") == expected
    for wrong in (-1, 65, 1.5, "2"):
        with pytest.raises(ServeError, match="api_server_count is"):
            ServerArgs(api_server_count=wrong)  # type: ignore[arg-type]


def test_a_process_that_cannot_start(base: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server says so, and leaves nothing behind."""
    popen = subprocess.Popen
    monkeypatch.setattr(
        multi_process.subprocess, "Popen", lambda command, **more: popen([sys.executable, "-c", "exit(3)"], **more)
    )
    args = ServerArgs(port=0, api_server_count=COUNT)
    with pytest.raises(ServeError, match="a process of the API ended with exit code 3"):
        serving.serve(other(base), args, tell=lambda text: None)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_command(folder: Path, base: LLM, number: signal.Signals) -> None:
    """It ends with its processes, however it is ended."""
    options = ("--api-server-count", str(COUNT), "--max-num-seqs", "2")
    with serve_command(folder, *options) as (process, url):
        for _ in range(2 * COUNT):
            with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
                found = client.completions.create(model=NAME, prompt="the sea", max_tokens=5, **GREEDY)
            assert found.choices[0].text == _expected(base, "the sea", 5).outputs[0].text
        process.send_signal(number)
        out, err = process.communicate(timeout=120)  # the processes hold the pipes until they end
        assert process.returncode == {signal.SIGINT: 130}.get(number, -number)
        assert out == ""
        assert '"POST /v1/completions HTTP/1.1" 200' in err
        assert "Traceback" not in err
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", urlsplit(url).port or 0), timeout=5).close()
