"""An OpenAI-compatible server: `serve(llm, ServerArgs(...))`, or `create_app(llm)` for another ASGI server."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from flashkernel.engine.llm import LLM
from flashkernel.engine.server.server_args import ServeError, ServerArgs

if TYPE_CHECKING:
    from starlette.applications import Starlette

__all__ = ["ServeError", "ServerArgs", "bind", "create_app", "serve"]


def create_app(llm: LLM, args: ServerArgs | None = None) -> Starlette:
    """The ASGI application. It steps the engine in a thread of its own: while it runs, nobody else may.

    Args:
        llm: The model.
        args: Limits; None takes the defaults.

    Returns:
        A Starlette application.
    """
    _need_packages()
    from flashkernel.engine.server.api_server import ApiServer

    return ApiServer(llm, args or ServerArgs()).application()


def bind(args: ServerArgs) -> socket.socket:
    """Binds the server's address, before a model is loaded in vain. Nobody can connect until `serve` listens.

    Args:
        args: `host` and `port`.

    Returns:
        A bound socket, for `serve`.

    Raises:
        ServeError: The address cannot be bound, or packages are missing.
    """
    _need_packages()
    made = socket.socket(socket.AF_INET6 if ":" in args.host else socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((args.host, args.port))
    except OSError as error:
        made.close()
        why = error.strerror or error
        raise ServeError(f"serve: {args.host} port {args.port} cannot be bound ({why}); choose another") from error
    return made


def serve(
    llm: LLM,
    args: ServerArgs | None = None,
    listener: socket.socket | None = None,
    tell: Callable[[str], None] = print,
) -> None:
    """Serves until SIGINT or SIGTERM comes; requests that are under way may then finish.

    Args:
        llm: The model.
        args: Address and limits; None takes the defaults.
        listener: A socket from `bind`; None binds one.
        tell: Called with messages for the user.
    """
    _need_packages()
    from flashkernel.engine.server.launcher import run

    args = args or ServerArgs()
    run(llm, args, listener or bind(args), tell)


def _need_packages() -> None:
    try:
        import prometheus_client  # noqa: F401
        import pydantic  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ServeError(f"serve: {error.name} is not installed; run `pip install 'flashkernel[serve]'`") from error
