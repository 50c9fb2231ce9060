"""The endpoints of the API, and the middleware before them."""

from __future__ import annotations

import hmac
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import anyio
from anyio import to_thread
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import flashkernel
from flashkernel.engine.server import errors, protocol
from flashkernel.engine.server.engine_client import EngineClient
from flashkernel.engine.server.errors import ApiError, ClientDisconnected
from flashkernel.engine.server.formatters import ChatFormatter, CompletionFormatter, ResponseFormatter
from flashkernel.engine.server.generation_response import GenerationResponse
from flashkernel.engine.server.protocol import ChatRequest, CompletionRequest
from flashkernel.engine.server.responses import ResponsesFormatter, ResponsesRequest
from flashkernel.engine.server.served_model import ServedModel
from flashkernel.engine.server.server_args import ServerArgs
from flashkernel.engine.server.tokenization import DetokenizeRequest, TokenizeRequest

log = logging.getLogger("flashkernel.server")
Formatter = TypeVar("Formatter", bound=ChatFormatter)
PUBLIC_PATH = "/health"  # the only path that needs no key
CLIENT_CLOSED_REQUEST = 499  # nginx's status for it; it is never sent
LINGER_S = 5.0  # for a client to finish sending a request that is refused


class ApiServer:
    """One model behind OpenAI's API.

    Args:
        engine: Generates; in this process or in another.
        model: The model as clients know it.
        args: Limits.
    """

    def __init__(self, engine: EngineClient, model: ServedModel, args: ServerArgs) -> None:
        self.engine, self.model, self.args = engine, model, args

    def application(self) -> Starlette:
        routes = [
            Route("/health", self.health),
            Route("/metrics", self.show_metrics),
            Route("/version", self.version),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.show_model),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/responses", self.respond, methods=["POST"]),
        ]
        cors = []
        if self.args.allowed_origins:
            cors.append(
                Middleware(
                    CORSMiddleware,
                    allow_origins=list(self.args.allowed_origins),
                    allow_methods=["GET", "POST"],
                    allow_headers=["*"],
                    expose_headers=["X-Request-Id"],
                )
            )
        return Starlette(
            routes=routes,
            middleware=[
                *cors,
                Middleware(LingeringCloseMiddleware),
                Middleware(AuthenticationMiddleware, self.args.api_key, self.engine, {route.path for route in routes}),
            ],
            exception_handlers={
                ApiError: _api_error,
                ClientDisconnected: _client_disconnected,
                HTTPException: _http_error,
                Exception: _server_error,
            },
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        if self.model.tokenizer is not None:
            await to_thread.run_sync(self.model.tokenizer.prepare_chat_template)
        await self.engine.start()
        try:
            yield
        finally:
            await self.engine.stop()

    async def health(self, request: Request) -> Response:
        """Whether the engine runs and its last step did not fail."""
        healthy = await self.engine.healthy()
        return JSONResponse({"status": "ok" if healthy else "failing"}, 200 if healthy else 503)

    async def show_metrics(self, request: Request) -> Response:
        return Response(await self.engine.metrics_text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": flashkernel.__version__})

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def show_model(self, request: Request) -> Response:
        asked = request.path_params["name"]
        if asked != self.model.name:
            raise errors.unknown_model(asked, self.model.name)
        return JSONResponse(self._card())

    async def tokenize(self, request: Request) -> Response:
        parsed = await self._parsed(request, TokenizeRequest)
        return JSONResponse(await to_thread.run_sync(parsed.response, self.model))

    async def detokenize(self, request: Request) -> Response:
        parsed = await self._parsed(request, DetokenizeRequest)
        return JSONResponse(await to_thread.run_sync(parsed.response, self.model))

    async def complete(self, request: Request) -> ASGIApp:
        parsed = await self._parsed(request, CompletionRequest)
        return self._response(parsed, CompletionFormatter(self.model.name, self.model.tokenizer, parsed))

    async def chat(self, request: Request) -> ASGIApp:
        parsed = await self._parsed(request, ChatRequest)
        return self._response(parsed, self._formatter(parsed, ChatFormatter))

    async def respond(self, request: Request) -> ASGIApp:
        parsed = await self._parsed(request, ResponsesRequest)
        formatter = self._formatter(parsed, ResponsesFormatter)
        formatter.echoed = parsed.echoed
        return self._response(parsed, formatter)

    def _formatter(self, parsed: ChatRequest, kind: type[Formatter]) -> Formatter:
        """A formatter with what the text is taken apart by."""
        tokenizer = self.model.tokenizer
        template = None if tokenizer is None else tokenizer.chat_template
        if parsed.parser(template).needs_special_tokens and parsed.skip_special_tokens is None:
            parsed.skip_special_tokens = False
        return kind(self.model.name, tokenizer, lambda: parsed.parser(template))

    async def _parsed(self, request: Request, kind: type[protocol.Kind]) -> protocol.Kind:
        parsed = protocol.parse(kind, await _read(request, self.args))
        if parsed.model is not None and parsed.model != self.model.name:
            raise errors.unknown_model(parsed.model, self.model.name)
        return parsed

    def _response(self, parsed: protocol.GenerationRequest, formatter: ResponseFormatter) -> ASGIApp:
        return GenerationResponse(self.engine, self.model.tokenizer, self.args, parsed, formatter)

    def _card(self) -> dict[str, Any]:
        return {
            "id": self.model.name,
            "object": "model",
            "created": self.model.created,
            "owned_by": "flashkernel",
            "max_model_len": self.model.max_model_len,
        }


class AuthenticationMiddleware:
    """Asks for the API key, and counts responses."""

    def __init__(self, app: ASGIApp, api_key: str | None, engine: EngineClient, paths: set[str]) -> None:
        self._app, self._engine, self._paths = app, engine, paths
        self._expected = None if api_key is None else f"bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self._paths else "other"  # clients cannot invent labels

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._engine.count_response(path, message["status"])
            await send(message)

        if scope["path"] == PUBLIC_PATH or self._authorized(scope):
            await self._app(scope, receive, counting)
        else:
            await _error_response(errors.wrong_key())(scope, receive, counting)

    def _authorized(self, scope: Scope) -> bool:
        if self._expected is None:
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        kind, _, key = given.partition(b" ")
        return hmac.compare_digest(kind.lower() + b" " + key.strip(), self._expected)


class LingeringCloseMiddleware:
    """Lets a client finish sending before its connection is closed.

    A socket that is closed while bytes lie unread is reset, and the client may lose the answer to its own failed send.
    So an answer that closes the connection is sent first, then the rest of the request is read and dropped, and only
    then the connection is closed.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or b"100-continue" in dict(scope["headers"]).get(b"expect", b"").lower():
            await self._app(scope, receive, send)  # who waits for permission sends nothing once refused
            return
        received = closing = False

        async def receiving() -> Message:
            nonlocal received
            message = await receive()
            received = received or message["type"] == "http.disconnect" or not message.get("more_body", False)
            return message

        async def sending(message: Message) -> None:
            nonlocal closing
            if message["type"] == "http.response.start":
                closing = any(name.lower() == b"connection" and b"close" in value for name, value in message["headers"])
            elif closing and not received and not message.get("more_body", False):
                await send({**message, "more_body": True})
                with anyio.move_on_after(LINGER_S):
                    while not received:
                        await receiving()
                message = {"type": "http.response.body", "body": b""}
            await send(message)

        await self._app(scope, receiving, sending)


async def _read(request: Request, args: ServerArgs) -> bytes:
    """Reads the body of a request, within the limits."""
    kind = request.headers.get("content-type")
    if (kind or "").partition(";")[0].strip().lower() != "application/json":
        raise errors.not_json(kind)  # pages of other sites can send anything but this without being asked first
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > args.max_body:
        raise errors.too_large(args.max_body)
    body = bytearray()
    try:
        with anyio.fail_after(args.client_timeout):
            async for chunk in request.stream():
                body += chunk
                if len(body) > args.max_body:
                    raise errors.too_large(args.max_body)
    except TimeoutError:
        raise errors.too_slow_to_send(args.client_timeout) from None
    except ClientDisconnect:
        raise ClientDisconnected from None
    return bytes(body)


def _error_response(error: ApiError) -> Response:
    return JSONResponse(error.body(), error.status, headers=error.headers)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _error_response(error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:200]}: {str(error.detail).lower()}"
    return _error_response(ApiError(error.status_code, message, headers=error.headers))


async def _client_disconnected(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _server_error(request: Request, error: Exception) -> Response:
    return _error_response(ApiError(500, "the server made a mistake; its log says which"))
