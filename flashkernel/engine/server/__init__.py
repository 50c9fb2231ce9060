"""A model behind the OpenAI API: `serve(llm, ServerOptions(...))`, or `create_app(llm)` for another ASGI server."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from flashkernel.engine.llm import LLM
from flashkernel.engine.server.options import ServeError, ServerOptions

if TYPE_CHECKING:
    from starlette.applications import Starlette

__all__ = ["ServeError", "ServerOptions", "bind", "create_app", "serve"]


def create_app(llm: LLM, options: ServerOptions | None = None) -> Starlette:
    """The ASGI application. It takes the engine's steps itself: while it runs, nobody else may."""
    _need_packages()
    from flashkernel.engine.server.app import Api

    return Api(llm, options or ServerOptions()).application()


def bind(options: ServerOptions) -> socket.socket:
    """The address, taken: before a model is loaded for nothing. Nobody can connect until `serve` listens."""
    _need_packages()
    made = socket.socket(socket.AF_INET6 if ":" in options.host else socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((options.host, options.port))
    except OSError as error:
        made.close()
        why = error.strerror or error
        raise ServeError(f"serve: {options.host} port {options.port} cannot be had ({why}); choose another") from error
    return made


def serve(
    llm: LLM,
    options: ServerOptions | None = None,
    listener: socket.socket | None = None,
    tell: Callable[[str], None] = print,
) -> None:
    """Serve until SIGINT or SIGTERM comes; requests that are under way may then finish."""
    _need_packages()
    from flashkernel.engine.server.run import run

    options = options or ServerOptions()
    run(llm, options, listener or bind(options), tell)


def _need_packages() -> None:
    try:
        import prometheus_client  # noqa: F401
        import pydantic  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ServeError(f"serve: {error.name} is not installed; run `pip install 'flashkernel[serve]'`") from error
