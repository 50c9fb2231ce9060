"""Runs the server on uvicorn."""

from __future__ import annotations

import asyncio
import copy
import math
import socket
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.config import LOGGING_CONFIG

from flashkernel.engine.server.api_server import ApiServer
from flashkernel.engine.server.served_model import ServedModel
from flashkernel.engine.server.server_args import ServerArgs

if TYPE_CHECKING:
    from flashkernel.engine.llm import LLM
    from flashkernel.engine.server.multi_process import ApiServerProcesses

# The engine's thread and the event loop share Python's lock. A thread that waits for it asks after this long, which is
# 5 ms by default: longer than a step of a small model.
SWITCH_INTERVAL_S = 0.0005
LAST_RESPONSES_S = 5.0  # after the grace, for error responses to the clients that are left


class Server(uvicorn.Server):
    """uvicorn with a graceful shutdown: requests may finish for `grace` seconds, and the rest get status 503."""

    def __init__(self, api: ApiServer, ready: Callable[[], None] | None = None) -> None:
        args = api.args
        config = uvicorn.Config(
            api.application(),
            log_config=_logging(),
            access_log=args.access_log,
            lifespan="on",
            ws="none",
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=math.ceil(args.grace + LAST_RESPONSES_S),
        )
        super().__init__(config)
        self._api, self._ready = api, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._ready is not None and self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._api.engine.drain(self._api.args.grace)
        await super().shutdown(sockets)


def run(
    llm: LLM,
    args: ServerArgs,
    listener: socket.socket,
    tell: Callable[[str], None],
    processes: ApiServerProcesses | None = None,
) -> None:
    """Serves on a bound socket until a signal comes."""
    model = ServedModel.of(llm, args)
    port = listener.getsockname()[1]
    host = f"[{args.host}]" if ":" in args.host else args.host

    def ready() -> None:
        tell(f"Serving {model.name} at http://{host}:{port}/v1 (Ctrl-C stops)")
        if not args.local and args.api_key is None:
            tell("Whoever can reach this machine can use the model: give an API key, or bind to 127.0.0.1")

    before = sys.getswitchinterval()
    sys.setswitchinterval(min(SWITCH_INTERVAL_S, before))
    try:
        with listener:
            if processes is None:
                from flashkernel.engine.server.async_engine import AsyncEngine

                api = ApiServer(AsyncEngine(llm.engine, args.max_queue), model, args)
                Server(api, ready).run([listener])
            else:
                from flashkernel.engine.server.multi_process import MultiProcessServer

                MultiProcessServer(llm, model, args, processes, ready).run()
    finally:
        sys.setswitchinterval(before)


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where it is installed, as uvicorn takes it."""
    try:
        import uvloop
    except ImportError:  # not on Windows
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()  # type: ignore[no-any-return]


def _logging() -> dict[str, Any]:
    """uvicorn's logging on stderr: accesses and errors."""
    config = copy.deepcopy(LOGGING_CONFIG)
    config["handlers"]["access"]["stream"] = "ext://sys.stderr"
    config["loggers"]["uvicorn"]["level"] = "WARNING"
    config["loggers"]["uvicorn.error"]["level"] = "WARNING"
    return config
