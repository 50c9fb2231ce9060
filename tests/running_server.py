"""A server in a thread, on a free port of this machine, and what tests ask of it."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

from flashkernel.engine import LLM
from flashkernel.engine import server as serving
from flashkernel.engine.server import ServerArgs
from flashkernel.engine.server.api_server import ApiServer
from flashkernel.engine.server.async_engine import AsyncEngine
from flashkernel.engine.server.launcher import Server
from flashkernel.engine.server.multi_process import MultiProcessServer
from flashkernel.engine.server.served_model import ServedModel

NAME = "tiny"


@dataclass
class Running:
    """A server in a thread."""

    llm: LLM
    engine: AsyncEngine
    server: Server | MultiProcessServer
    port: int
    thread: threading.Thread

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def client(self, **options: Any) -> Any:
        return openai.OpenAI(base_url=self.url, **{"api_key": "none", "max_retries": 0, "timeout": 60, **options})

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def call(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any, Any]:
        """Status, body (parsed where it is JSON) and headers of a plain HTTP call."""
        connection = self.connection()
        sent = {"content-type": "application/json", **{name.replace("_", "-"): text for name, text in headers.items()}}
        connection.request(method, path, body if isinstance(body, bytes | None) else json.dumps(body), sent)
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        is_json = "json" in response.headers.get("content-type", "")
        return response.status, json.loads(text) if is_json else text, response.headers

    def metric(self, name: str) -> float:
        found = re.search(rf"^{re.escape(name)} (\S+)$", self.call("GET", "/metrics")[1], re.MULTILINE)
        assert found, f"there is no metric {name}"
        return float(found[1])

    def idle(self) -> bool:
        """The engine has nothing to do and holds no page."""
        engine = self.llm.engine
        return (
            not engine.has_unfinished_requests()
            and engine.stats().num_used_blocks == 0
            and engine.stats().num_running == 0
        )

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(60)
        assert not self.thread.is_alive()


def api_of(llm: LLM, args: ServerArgs) -> tuple[ApiServer, AsyncEngine]:
    """The API and the engine of a server that has one process."""
    engine = AsyncEngine(llm.engine, args.max_queue)
    return ApiServer(engine, ServedModel.of(llm, args), args), engine


@contextmanager
def serve_command(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`flashkernel serve` as a process of its own that has begun to serve, and its address."""
    command = [sys.executable, "-m", "flashkernel", "serve", str(folder), "--port", "0", "--device", "cpu", *options]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        # A shell that starts tests in the background has its children ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        if re.fullmatch(r"1 kernel\(s\) compiled in \S+ s; nothing is left to compile\n", line):  # its cache is new
            line = process.stderr.readline()
        found = re.fullmatch(r"Serving tiny at (http://127\.0\.0\.1:\d+/v1) \(Ctrl-C stops\)\n", line)
        assert found, line
        yield process, found[1]
    finally:
        process.kill()
        process.wait(10)


@contextmanager
def serve(llm: LLM, **options: Any) -> Iterator[Running]:
    chosen = ServerArgs(**{"port": 0, "served_model_name": NAME, "access_log": False, **options})
    listener = serving.bind(chosen)
    port = listener.getsockname()[1]
    processes = serving.start_processes(chosen, listener, "cpu")
    if processes is None:
        api, engine = api_of(llm, chosen)
        server: Server | MultiProcessServer = Server(api)
        thread = threading.Thread(target=Server.run, args=(server, [listener]))
    else:
        server = MultiProcessServer(llm, ServedModel.of(llm, chosen), chosen, processes)
        engine, thread = server.engine, threading.Thread(target=server.run)
    running = Running(llm, engine, server, port, thread)
    thread.start()
    try:
        assert comes(lambda: server.started)
        yield running
        assert comes(running.idle), "a request outlived its client"
    finally:
        running.stop()
    assert not llm.engine.scheduler.cache.sequences


def comes(condition: Callable[[], bool], seconds: float = 30) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def other(base: LLM, **options: Any) -> LLM:
    return LLM(base.model, base.tokenizer, **{"kv_cache_tokens": 2048, "block_size": 16, **options})


def slow(base: LLM, seconds: float = 0.02, **options: Any) -> LLM:
    """The same model, with steps that take their time."""
    llm = other(base, **options)
    launch = llm.engine.runner.launch

    def slowly(batch: Any) -> Any:
        time.sleep(seconds)
        return launch(batch)

    llm.engine.runner.launch = slowly  # type: ignore[method-assign]
    return llm
