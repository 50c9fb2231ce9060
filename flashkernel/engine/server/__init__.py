"""An OpenAI-compatible server: `serve(llm, ServerArgs(...))`, or `create_app(llm)` for another ASGI server."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from flashkernel.engine.server.server_args import ServeError, ServerArgs

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from flashkernel.engine.llm import LLM
    from flashkernel.engine.server.multi_process import ApiServerProcesses

__all__ = ["ServeError", "ServerArgs", "bind", "create_app", "serve", "start_processes"]


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
    from flashkernel.engine.server.async_engine import AsyncEngine
    from flashkernel.engine.server.served_model import ServedModel

    args = args or ServerArgs()
    return ApiServer(AsyncEngine(llm.engine, args.max_queue), ServedModel.of(llm, args), args).application()


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


def start_processes(args: ServerArgs, listener: socket.socket, device_type: str) -> ApiServerProcesses | None:
    """Starts the processes of the API, which import what they need while a model is loaded.

    Args:
        args: `api_server_count`.
        listener: A socket from `bind`.
        device_type: Of the model's device, such as "cuda".

    Returns:
        For `serve`; leaving its context ends them. None if the engine's process serves the API.
    """
    from flashkernel.engine.server.multi_process import ApiServerProcesses, default_count

    count = default_count(device_type) if args.api_server_count is None else args.api_server_count
    return ApiServerProcesses(listener, count) if count else None


def serve(
    llm: LLM,
    args: ServerArgs | None = None,
    listener: socket.socket | None = None,
    tell: Callable[[str], None] = print,
    processes: ApiServerProcesses | None = None,
) -> None:
    """Serves until SIGINT or SIGTERM comes; requests that are under way may then finish.

    Args:
        llm: The model.
        args: Address and limits; None takes the defaults.
        listener: A socket from `bind`; None binds one.
        tell: Called with messages for the user.
        processes: From `start_processes`; None starts as many as `args` say.
    """
    _need_packages()
    from flashkernel.engine.server.launcher import run

    args = args or ServerArgs()
    with ExitStack() as stack:
        listener = listener or stack.enter_context(bind(args))
        if processes is None:
            processes = start_processes(args, listener, llm.model.device.type)
            if processes is not None:
                stack.enter_context(processes)
        run(llm, args, listener, tell, processes)


def _need_packages() -> None:
    try:
        import prometheus_client  # noqa: F401
        import pydantic  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ServeError(f"serve: {error.name} is not installed; run `pip install 'flashkernel[serve]'`") from error
