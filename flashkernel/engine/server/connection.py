"""Messages between the engine's process and those of API servers: pickled tuples, each behind its length.

The sockets are pairs that the engine's process makes and its children inherit: nobody else can write to them.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import socket
import struct
from collections.abc import Callable
from typing import Any, cast

log = logging.getLogger("flashkernel.server")
_LENGTH = struct.Struct("<Q")


class Connection(asyncio.Protocol):
    """One end. Messages are ("kind", values...); each kind has a handler.

    Args:
        handlers: By kind: called on the event loop with the message's values.
        on_lost: Called once, when the other end is gone.
    """

    def __init__(self, handlers: dict[str, Callable[..., None]], on_lost: Callable[[], None]) -> None:
        self.handlers, self._on_lost = handlers, on_lost
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None

    async def open(self, end: socket.socket) -> None:
        """Takes over one end of a socket pair."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=end)

    @property
    def is_open(self) -> bool:
        """Whether the other end may still read."""
        return self._transport is not None and not self._transport.is_closing()

    def send(self, kind: str, *values: Any) -> None:
        """Sends a message; nothing happens if the other end is gone. It never waits."""
        if self.is_open:
            assert self._transport is not None
            body = pickle.dumps((kind, *values), pickle.HIGHEST_PROTOCOL)
            self._transport.write(_LENGTH.pack(len(body)) + body)

    def close(self) -> None:
        """Closes the connection, once what was sent is written."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by name

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost()

    def data_received(self, data: bytes) -> None:
        self._received += data
        begin = 0
        while len(self._received) - begin >= _LENGTH.size:
            body = begin + _LENGTH.size
            end = body + _LENGTH.unpack_from(self._received, begin)[0]
            if len(self._received) < end:
                break
            kind, *values = pickle.loads(self._received[body:end])
            begin = end
            try:
                self.handlers[kind](*values)
            except Exception:  # of one message; the others are not to blame
                log.exception("the message %r of another process could not be handled", kind)
        del self._received[:begin]
