"""A process that serves the API for an engine in another process. `multi_process.py` starts it."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from flashkernel.engine.server.api_server import ApiServer
from flashkernel.engine.server.connection import Connection
from flashkernel.engine.server.launcher import Server, new_event_loop
from flashkernel.engine.server.remote_engine import RemoteEngine
from flashkernel.engine.server.served_model import ServedModel
from flashkernel.engine.server.server_args import ServerArgs


class _Server(Server):
    """It is told by the engine's process when to stop, not by signals."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def main(connection: int, listener: int) -> None:
    """Serves until the engine's process says so or is gone.

    Args:
        connection: File descriptor of this end of a socket pair.
        listener: File descriptor of a bound socket.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # service managers send them to all processes of a service
        signal.signal(number, signal.SIG_IGN)
    loop = new_event_loop()
    try:
        loop.run_until_complete(_serve(socket.socket(fileno=connection), socket.socket(fileno=listener)))
    finally:
        loop.close()


async def _serve(end: socket.socket, listener: socket.socket) -> None:
    told: asyncio.Future[tuple[Any, ...] | None] = asyncio.get_running_loop().create_future()
    when_lost: list[Callable[[], None]] = []

    def lost() -> None:
        if not told.done():
            told.set_result(None)
        for call in when_lost:
            call()

    def start(model: ServedModel, args: ServerArgs, capacity: int) -> None:
        told.set_result((model, args, capacity))

    connection = Connection({"start": start}, lost)
    await connection.open(end)
    found = await told
    if found is None:  # no model was loaded
        return
    model, args, capacity = found
    engine = RemoteEngine(connection, capacity)
    server = _Server(ApiServer(engine, model, args), lambda: connection.send("ready"))

    def drain() -> None:
        server.should_exit = True

    connection.handlers["drain"] = drain
    when_lost += [engine.lost, drain]
    if connection.is_open:
        await server.serve([listener])
