"""Serving on uvicorn."""

from __future__ import annotations

import copy
import math
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.config import LOGGING_CONFIG

from flashkernel.engine.llm import LLM
from flashkernel.engine.server.app import Api
from flashkernel.engine.server.options import ServerOptions

LAST_WORDS_S = 5.0  # after the grace, for errors to be told to clients that are left


class Server(uvicorn.Server):
    """uvicorn, which when told to stop lets requests finish for a while, and tells the rest why they end."""

    def __init__(self, api: Api, ready: Callable[[], None] | None = None) -> None:
        options = api.options
        config = uvicorn.Config(
            api.application(),
            log_config=_logging(),
            access_log=options.access_log,
            lifespan="on",
            ws="none",
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=math.ceil(options.grace + LAST_WORDS_S),
        )
        super().__init__(config)
        self._api, self._ready = api, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._ready is not None and self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._api.driver.drain(self._api.options.grace)
        await super().shutdown(sockets)


def run(llm: LLM, options: ServerOptions, listener: socket.socket, tell: Callable[[str], None]) -> None:
    """Serve on a bound socket until a signal comes."""
    api = Api(llm, options)
    port = listener.getsockname()[1]
    host = f"[{options.host}]" if ":" in options.host else options.host

    def ready() -> None:
        tell(f"Serving {api.name} at http://{host}:{port}/v1 (Ctrl-C stops)")
        if not options.local and options.api_key is None:
            tell("Whoever can reach this machine can use the model: give an API key, or bind to 127.0.0.1")

    with listener:
        Server(api, ready).run([listener])


def _logging() -> dict[str, Any]:
    """uvicorn's own, on standard error: accesses, and what goes wrong."""
    config = copy.deepcopy(LOGGING_CONFIG)
    config["handlers"]["access"]["stream"] = "ext://sys.stderr"
    config["loggers"]["uvicorn"]["level"] = "WARNING"
    config["loggers"]["uvicorn.error"]["level"] = "WARNING"
    return config
