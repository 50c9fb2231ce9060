"""Errors in the format of OpenAI's API: a status, and an object that says what is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TYPES = {
    401: "authentication_error", 404: "not_found_error", 408: "timeout_error", 429: "rate_limit_error",
    500: "server_error", 503: "service_unavailable_error", 504: "timeout_error",
}  # fmt: skip
RETRY_AFTER_S = 1


class ApiError(Exception):
    """An error response."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def __reduce__(self) -> tuple[Any, ...]:  # with keyword arguments, which pickled exceptions lose
        return type(self)._made, (self.status, self.message, self.param, self.code, self.headers)

    @classmethod
    def _made(
        cls, status: int, message: str, param: str | None, code: str | None, headers: Mapping[str, str]
    ) -> ApiError:
        return cls(status, message, param=param, code=code, headers=headers)

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class ClientDisconnected(Exception):
    """The client has left; the response is not read."""


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param=param)


def prompt_too_long(count: int, longest: int) -> ApiError:
    """Clients know it by its code, langchain by the first half of the message and litellm by the second."""
    message = (
        f"the prompt is too long: it has {count} tokens. This model's maximum context length is {longest} tokens, and "
        "one must be left to generate; shorten the prompt, or start the server with a larger --max-model-len"
    )
    return ApiError(400, message, code="context_length_exceeded")


def wrong_key() -> ApiError:
    message = "the API key is missing or wrong; send it as `Authorization: Bearer KEY`"
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def unknown_model(asked: str, served: str) -> ApiError:
    message = f"there is no model {asked[:100]!r} here; this server has {served!r}"
    return ApiError(404, message, param="model", code="model_not_found")


def too_slow_to_send(seconds: float) -> ApiError:
    return ApiError(408, f"the request did not arrive within {seconds:g} s", headers={"Connection": "close"})


def too_large(most: int) -> ApiError:
    message = f"the request is larger than the {most} bytes this server takes"
    return ApiError(413, message, code="request_too_large", headers={"Connection": "close"})


def not_json(given: str | None) -> ApiError:
    message = f"the request has the content type {given!r}; it must be 'application/json'"
    return ApiError(415, message, headers={"Connection": "close"})


def too_many_requests(capacity: int) -> ApiError:
    message = f"the server has {capacity} requests already, as many as it takes; try again later"
    return ApiError(429, message, code="rate_limit_exceeded", headers={"Retry-After": str(RETRY_AFTER_S)})


def engine_failed() -> ApiError:
    return ApiError(500, "the model failed while it computed this request; the server's log says why")


def engine_dead() -> ApiError:
    return ApiError(503, "the model is out of service; the server's log says why, and a restart may help")


def shutting_down() -> ApiError:
    message = "the server is shutting down"
    return ApiError(503, message, code="shutting_down", headers={"Retry-After": str(RETRY_AFTER_S)})


def timed_out(seconds: float) -> ApiError:
    return ApiError(504, f"the request was not done within {seconds:g} s, its time in the queue included")
