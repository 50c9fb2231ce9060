"""Arguments of the server."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

MAX_PROCESSES = 64


class ServeError(ValueError):
    """A server that cannot be started; the message says what to do."""


@dataclass(frozen=True)
class ServerArgs:
    """Address and limits of a server. How many requests run at the same time is the engine's `max_num_seqs`.

    Args:
        host: Address to bind to; "0.0.0.0" lets other machines in.
        port: Port; 0 takes a free one.
        served_model_name: What clients call the model; by default the last part of its path.
        api_key: Key that every path but /health asks for.
        max_queue: Requests that may wait beside those that run; further ones get status 429.
        timeout: Seconds a request may take, its time in the queue included.
        client_timeout: Seconds a client may take to send its request, or to read what is there for it.
        max_body: Bytes of a request.
        grace: Seconds that requests have to finish when the server is told to stop.
        access_log: Logs a line for each request.
        allowed_origins: Web pages from these origins may use the server (CORS); "*" is any. By default none may.
        api_server_count: Processes that serve the API, beside the engine's; 0: the engine's own serves it. None: one
            for every four cores, up to four, with a GPU, and 0 on a CPU.

    Raises:
        ServeError: A value is out of its range.

    Example:
        >>> from flashkernel.engine.server import ServerArgs
        >>> ServerArgs(port=0, served_model_name="tiny").local
        True
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    api_key: str | None = None
    max_queue: int = 1024
    timeout: float = 600.0
    client_timeout: float = 30.0
    max_body: int = 4 * 2**20
    grace: float = 30.0
    access_log: bool = True
    allowed_origins: tuple[str, ...] = ()
    api_server_count: int | None = None

    def __post_init__(self) -> None:
        for name, least, most in (("port", 0, 65535), ("max_queue", 0, 2**31), ("max_body", 1, 2**31)):
            value = getattr(self, name)
            if not isinstance(value, int) or not least <= value <= most:
                raise ServeError(f"serve: {name} is {value!r}; it must be a whole number from {least} to {most}")
        for name, shortest in (("timeout", 0.001), ("client_timeout", 0.001), ("grace", 0.0)):
            value = getattr(self, name)
            if not math.isfinite(value) or value < shortest:
                raise ServeError(f"serve: {name} is {value!r}; it must be a number of seconds, at least {shortest:g}")
        count = self.api_server_count
        if count is not None and (not isinstance(count, int) or not 0 <= count <= MAX_PROCESSES):
            raise ServeError(
                f"serve: api_server_count is {count!r}; it must be a whole number from 0 to {MAX_PROCESSES}"
            )
        if count and os.name != "posix":
            raise ServeError(f"serve: api_server_count is {count}; this system cannot share a socket, leave it at 0")
        if self.api_key is not None and (not self.api_key.isascii() or not self.api_key.strip()):
            raise ServeError("serve: the API key is empty or has letters that a header cannot carry; use plain ASCII")
        if self.served_model_name is not None and not self.served_model_name.strip():
            raise ServeError("serve: served_model_name is empty; leave it out, or say what clients call the model")

    @property
    def local(self) -> bool:
        """Whether only this machine can reach the server."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")
