"""The server with processes of their own for the API: this is the engine's process.

One process that steps the engine and talks to hundreds of clients does both on one core at a time, because of Python's
lock: writing a token to a stream takes longer than computing it. Here the clients' processes parse, tokenize and
write, and the engine's process sees token ids come in and one message for each step and process go out.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

from flashkernel.core import env
from flashkernel.core.compile_ahead import num_cores
from flashkernel.core.signals import handled
from flashkernel.engine.llm import LLM
from flashkernel.engine.outputs import StepOutput
from flashkernel.engine.server import errors
from flashkernel.engine.server.async_engine import AsyncEngine
from flashkernel.engine.server.connection import Connection
from flashkernel.engine.server.engine_client import EngineRequest
from flashkernel.engine.server.errors import ApiError
from flashkernel.engine.server.launcher import LAST_RESPONSES_S, new_event_loop
from flashkernel.engine.server.served_model import ServedModel
from flashkernel.engine.server.server_args import ServeError, ServerArgs

log = logging.getLogger("flashkernel.server")
TICK_S = 0.05  # between looks for a signal or a process that has ended
EXIT_S = 5.0  # for a process to end after its last response


class ApiServerProcesses:
    """Processes that import what the API needs, and then wait for a model. Leaving the context ends them.

    Args:
        listener: A bound socket. Nobody can connect until there is a model.
        count: How many.
    """

    def __init__(self, listener: socket.socket, count: int) -> None:
        self._listener = listener
        if count > 1:
            _share_port(listener)
        self._own_sockets = count > 1
        self.children = [self.start() for _ in range(count)]

    def __enter__(self) -> ApiServerProcesses:
        return self

    def __exit__(self, *error: object) -> None:
        for child in self.children:
            child.kill()
        self._listener.close()

    def start(self) -> Child:
        """Starts a process."""
        with self._socket() as listener:
            return Child(listener)

    def stop_listening(self) -> None:
        """Gives up the address; processes that still listen have it."""
        self._listener.close()

    def _socket(self) -> socket.socket:
        """The socket of a process. Each has its own where that can be: the kernel then spreads connections evenly."""
        if self._own_sockets:
            made = socket.socket(self._listener.family, self._listener.type)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _share_port(made)
            try:
                made.bind(self._listener.getsockname())
                return made
            except OSError:  # the system shares no ports: all accept from one socket
                made.close()
                self._own_sockets = False
        return self._listener.dup()


def _share_port(one: socket.socket) -> None:
    with suppress(AttributeError, OSError):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)


class Child:
    """A process for the API, and this process's end of the connection to it."""

    def __init__(self, listener: socket.socket) -> None:
        ours, theirs = socket.socketpair()
        self._end: socket.socket | None = ours
        module = "flashkernel.engine.server.api_server_process"
        start = f"import sys; from {module} import main; main(*map(int, sys.argv[1:]))"
        with theirs:
            descriptors = (theirs.fileno(), listener.fileno())
            self.process = subprocess.Popen(
                [sys.executable, "-c", start, *map(str, descriptors)],
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                env={**env.of_child(), "CUDA_VISIBLE_DEVICES": ""},  # the GPU's memory is the engine's
                start_new_session=True,  # Ctrl-C is for the engine's process
            )

    def take_end(self) -> socket.socket:
        """This process's end, which is the caller's from now on."""
        assert self._end is not None, "it was taken before"
        end, self._end = self._end, None
        return end

    def kill(self) -> None:
        """Ends the process at once, if it has not ended."""
        if self._end is not None:
            self._end.close()
        self.process.kill()
        self.process.wait()


class _Sink:
    """Forwards the outputs of one HTTP call's requests. An `OutputSink`."""

    def __init__(self, requests: list[EngineRequest], client: ApiClient) -> None:
        self.unfinished = {one.request_id for one in requests}
        self.ended = asyncio.Event()  # finished or failed, or the client has left
        self._client = client

    def put(self, output: StepOutput) -> None:
        """Forwards an output, together with the others of the step."""
        self._client.forward(output)
        if output.request_output is not None:
            self.unfinished.discard(output.request_id)
            if not self.unfinished:
                self.ended.set()

    def fail(self, error: Exception) -> None:
        """Forwards the error that ends what is not finished."""
        if self.unfinished and not self.ended.is_set():
            self._client.fail(list(self.unfinished), error)
            self.ended.set()


class ApiClient:
    """One process of the API, as a client of the engine."""

    def __init__(self, engine: AsyncEngine, child: Child) -> None:
        self.child, self.ready, self.lost = child, False, False
        self.given_up = False  # it ended before it could serve: another one would end likewise
        self._engine = engine
        self._sinks: dict[str, _Sink] = {}  # by the first request id of a call
        self._calls: set[asyncio.Task[None]] = set()
        self._outputs: list[tuple[Any, ...]] = []  # of the step that is being delivered
        handlers: dict[str, Callable[..., None]] = {
            "ready": self._on_ready,
            "add": self._on_add,
            "leave": self._on_leave,
            "ask": self._on_ask,
            "count_response": engine.count_response,
        }
        self.connection = Connection(handlers, self._on_lost)

    @property
    def running(self) -> bool:
        """Whether the process is there and can be reached."""
        return not self.lost and self.child.process.poll() is None

    def forward(self, output: StepOutput) -> None:
        """Sends an output with the others of its step."""
        if not self._outputs:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outputs.append(tuple(output))

    def fail(self, request_ids: list[str], error: Exception) -> None:
        """Sends an error, after what came before it."""
        self._flush()
        self.connection.send("failed", request_ids, error)

    def _flush(self) -> None:
        if self._outputs:
            outputs, self._outputs = self._outputs, []
            self.connection.send("outputs", outputs)

    def _on_ready(self) -> None:
        self.ready = True

    def _on_add(self, requests: list[EngineRequest], timeout: float) -> None:
        sink = self._sinks[requests[0].request_id] = _Sink(requests, self)  # "leave" may be the next message
        call = asyncio.get_running_loop().create_task(self._serve(requests, sink, timeout))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _serve(self, requests: list[EngineRequest], sink: _Sink, timeout: float) -> None:
        """Serves the requests of one HTTP call."""
        request_ids = [one.request_id for one in requests]
        try:
            async with self._engine.serve(request_ids, sink, timeout):
                await self._engine.add(requests)
                await sink.ended.wait()
        except ApiError as error:
            sink.fail(error)
        except Exception:
            log.exception("a request could not be served")
            sink.fail(errors.engine_failed())
        finally:
            del self._sinks[request_ids[0]]

    def _on_leave(self, request_id: str) -> None:
        sink = self._sinks.get(request_id)
        if sink is not None:
            sink.ended.set()

    def _on_ask(self, number: int, what: str) -> None:
        call = asyncio.get_running_loop().create_task(self._answer(number, what))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _answer(self, number: int, what: str) -> None:
        ask = {"healthy": self._engine.healthy, "metrics_text": self._engine.metrics_text}[what]
        self.connection.send("answer", number, await ask())

    def _on_lost(self) -> None:
        self.lost = True
        for sink in self._sinks.values():
            sink.ended.set()


class MultiProcessServer:
    """Runs the engine, and keeps the API's processes alive. Its names are those of uvicorn's `Server`.

    Args:
        llm: The engine's.
        model: The model as clients know it.
        args: Address and limits.
        processes: They wait for the model.
        ready: Called when all of them listen.
    """

    def __init__(
        self,
        llm: LLM,
        model: ServedModel,
        args: ServerArgs,
        processes: ApiServerProcesses,
        ready: Callable[[], None] = lambda: None,
    ) -> None:
        self.engine = AsyncEngine(llm.engine, args.max_queue)
        self.started = self.should_exit = self.force_exit = False
        self._model, self._args, self._processes, self._ready = model, args, processes, ready
        self._clients: list[ApiClient] = []

    def run(self) -> None:
        """Serves until SIGINT or SIGTERM comes, which are raised again at the end."""
        captured: list[int] = []

        def handle(number: int, frame: object) -> None:
            captured.append(number)
            self.force_exit = self.force_exit or (self.should_exit and number == signal.SIGINT)
            self.should_exit = True

        loop = new_event_loop()
        try:
            with ExitStack() as stack:
                for one in (signal.SIGINT, signal.SIGTERM):
                    stack.enter_context(handled(one, handle))
                loop.run_until_complete(self._run())
        finally:
            loop.close()
        for number in reversed(captured):
            signal.raise_signal(number)

    async def _run(self) -> None:
        await self.engine.start()
        try:
            with self._processes:
                self._clients = [await self._connect(child) for child in self._processes.children]
                await self._wait_until_ready()
                while not self.should_exit:
                    await asyncio.sleep(TICK_S)
                    await self._replace_ended()
                await self._drain()
        finally:
            for client in self._clients:
                client.connection.close()
            await self.engine.stop()

    async def _connect(self, child: Child) -> ApiClient:
        """Tells a process what it serves."""
        client = ApiClient(self.engine, child)
        await client.connection.open(child.take_end())
        client.connection.send("start", self._model, self._args, self.engine.capacity)
        return client

    async def _wait_until_ready(self) -> None:
        while not all(client.ready for client in self._clients):
            ended = next((client for client in self._clients if not client.running), None)
            if ended is not None:
                code = ended.child.process.wait()
                raise ServeError(f"serve: a process of the API ended with exit code {code}; its message is above")
            if self.should_exit:
                return
            await asyncio.sleep(TICK_S)
        self.started = True
        self._ready()

    async def _replace_ended(self) -> None:
        """Starts a process for each that has ended. Its requests were aborted as its connection was lost."""
        for index, client in enumerate(self._clients):
            if client.running or client.given_up:
                continue
            client.child.kill()
            code = client.child.process.poll()
            if not client.ready:
                client.given_up = True
                log.error("a process of the API ended with exit code %s before it could serve; it stays away", code)
                if not any(other.running for other in self._clients):
                    raise ServeError("serve: no process of the API is left; their messages are above")
                continue
            log.error("a process of the API ended with exit code %s; another is started", code)
            child = self._processes.children[index] = self._processes.start()
            self._clients[index] = await self._connect(child)

    async def _drain(self) -> None:
        """Lets requests finish, and the processes end."""
        self.engine.drain(self._args.grace)
        self._processes.stop_listening()
        for client in self._clients:
            client.connection.send("drain")
        end = time.monotonic() + self._args.grace + LAST_RESPONSES_S + EXIT_S
        while any(client.child.process.poll() is None for client in self._clients):
            if self.force_exit or time.monotonic() > end:
                break
            await asyncio.sleep(TICK_S)


def default_count(device_type: str) -> int:
    """How many processes for the API a server starts unless it is told.

    None on a CPU, where the engine has all cores and a step takes longer than writing its tokens.

    Args:
        device_type: Of the model's device.
    """
    if device_type == "cpu" or os.name != "posix":
        return 0
    return max(1, min(4, num_cores() // 4))
