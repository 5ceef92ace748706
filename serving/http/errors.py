"""Every refusal in OpenAI's shape, with its status: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from phasewise.serving.errors import (
    ContextLengthExceeded,
    QueueFull,
    RankLost,
    RanksError,
    RequestError,
    StepFailed,
    Stopping,
)

RETRY_AFTER_S = 1
_MOST_MESSAGE = 600
_MOST_NAME = 80  # of what the sender wrote and we repeat


class ApiError(Exception):
    """An answer other than 200. `code` is OpenAI's machine-readable reason, where it has one.

    `retry_after_s`: when to try again, for 429 and 503. `closes`: the connection ends with this answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        closes: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= _MOST_MESSAGE else f"{message[:_MOST_MESSAGE]}..."
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.closes = closes

    def body(self) -> dict[str, Any]:
        kind = _TYPE_OF_STATUS.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        headers = {}
        if self.status in (429, 503):
            headers["Retry-After"] = str(self.retry_after_s or RETRY_AFTER_S)
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.closes:
            headers["Connection"] = "close"
        return JSONResponse(self.body(), self.status, headers)


class ClientLeft(Exception):
    """The connection closed before there was anything to send."""


_CLIENT_LEFT = 499  # nginx's code: counted, never sent
_TYPE_OF_STATUS = {
    401: "authentication_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


# Fields of several possible types, where the first mismatch says too little.
_SHAPES = {
    "prompt": "a text, a list of texts, a list of token ids or a list of such lists, and no list empty",
    "tool_choice": 'none, auto, required or {"type": "function", "function": {"name": NAME}}',
    "stop": "a text or a list of at most 16 texts, each of 1 to 256 characters",
}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unknown_model(asked: str, served: str) -> ApiError:
    message = f"the model {asked[:_MOST_NAME]!r} is not served here; this server has {served!r}"
    return ApiError(404, message, param="model", code="model_not_found")


def from_validation(error: ValidationError) -> ApiError:
    """The first thing wrong with a body, in one line."""
    first = error.errors(include_url=False, include_input=False)[0]
    # Union members and positions follow the field's name; the name is what the sender can look up.
    path = [str(part) for part in first["loc"]]
    if first["type"] == "json_invalid":
        return bad_request(f"the body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}")
    where = path[0] if path else None
    if where in _SHAPES:
        return bad_request(f"{where} must be {_SHAPES[where]}", param=where)
    return bad_request(
        f"{'.'.join(path) or 'body'}: {first['msg'].removeprefix('Value error, ')}", param=where
    )


def from_engine(error: Exception) -> ApiError:
    """What a failed request is told, by the kind of its error."""
    match error:
        case ApiError():
            return error
        case ContextLengthExceeded():
            return bad_request(str(error), error.param, "context_length_exceeded")
        case RequestError():
            return bad_request(str(error), error.param)
        case QueueFull():
            return ApiError(429, str(error), code="queue_full", retry_after_s=error.retry_after_s)
        case Stopping():
            return ApiError(503, str(error), code="server_stopping")
        case StepFailed():
            return ApiError(500, str(error), code="engine_error")
        case RankLost():
            message = f"{error}; the ranks are started anew, send the request again"
            return ApiError(503, message, code="rank_lost", retry_after_s=1)
        case RanksError():
            return ApiError(503, str(error), code="engine_stopped")
        case _:
            return ApiError(500, f"the server failed: {type(error).__name__}", code="internal_error")


def install(app: FastAPI, refused: Callable[[ApiError], None]) -> None:
    """Make every error of `app`, ours or the framework's, come out in the one shape. `refused` sees ours."""

    @app.exception_handler(ApiError)
    async def _api_error(_request: Request, error: ApiError) -> JSONResponse:
        refused(error)
        return error.response()

    @app.exception_handler(ClientLeft)
    async def _client_left(_request: Request, _error: ClientLeft) -> Response:
        return Response(status_code=_CLIENT_LEFT)

    @app.exception_handler(HTTPException)
    async def _http_error(request: Request, error: HTTPException) -> JSONResponse:
        what = {
            404: f"there is no {request.url.path[:_MOST_NAME]} here",
            405: f"{request.method} is not allowed on {request.url.path[:_MOST_NAME]}",
        }
        response = ApiError(error.status_code, what.get(error.status_code, str(error.detail))).response()
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def _surprise(_request: Request, error: Exception) -> JSONResponse:
        return from_engine(error).response()
