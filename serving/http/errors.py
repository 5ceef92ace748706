"""Error answers in OpenAI's shape, with their status: `{"error": {"message", "type", "param", "code"}}`.

`/v1/messages` has Anthropic's shape, `{"type": "error", "error": {"type", "message"}}`, and `/api/` Ollama's,
`{"error": MESSAGE}`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from phasewise.serving.errors import (
    ContextLengthExceeded,
    QueueFull,
    RankLost,
    RanksError,
    RequestError,
    ServingError,
    StepFailed,
    Stopping,
)
from phasewise.serving.sandbox.confined import Abandoned

RETRY_AFTER_S = 1
_MOST_MESSAGE = 600
_MOST_NAME = 80  # of what the sender wrote and we repeat


class ApiError(Exception):
    """An HTTP error answer. `code`: OpenAI's machine-readable reason, if any. `retry_after_s`: for 429 and
    503, seconds until the client should retry. `closes`: the connection is closed after the answer."""

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
        message = message.encode(errors="backslashreplace").decode()  # names of files may be any bytes
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= _MOST_MESSAGE else f"{message[:_MOST_MESSAGE]}..."
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.closes = closes

    def words(self, path: str) -> str:
        """The message in the wording of the API that `path` belongs to."""
        return self.message

    def body(self) -> dict[str, Any]:
        kind = _TYPE_OF_STATUS.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def anthropic_body(self) -> dict[str, Any]:
        kind = _ANTHROPIC_TYPE_OF_STATUS.get(self.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def ollama_body(self) -> dict[str, Any]:
        return {"error": self.message}

    def response(self, path: str = "") -> JSONResponse:
        """The HTTP response, its body in the shape of the API that `path` belongs to."""
        headers = {}
        if self.status in (429, 503):
            headers["Retry-After"] = str(self.retry_after_s or RETRY_AFTER_S)
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.closes:
            headers["Connection"] = "close"
        self.message = self.words(path)
        if path.startswith(_ANTHROPIC_PATHS):
            return JSONResponse(self.anthropic_body(), self.status, headers)
        body = self.ollama_body() if path.startswith(_OLLAMA_PATHS) else self.body()
        return JSONResponse(body, self.status, headers)

    def raw_response(self) -> bytes:
        """The bytes of an HTTP/1 answer for use below the framework, with `Connection: close`."""
        answer = self.response()
        lines = [f"HTTP/1.1 {self.status} ".encode(), b"connection: close"]
        lines += [name + b": " + value for name, value in answer.raw_headers if name != b"connection"]
        return b"\r\n".join(lines) + b"\r\n\r\n" + bytes(answer.body)


class PromptTooLong(ApiError):
    """A prompt that leaves no room for an answer, worded as clients of each API recognise the error."""

    def __init__(self, error: ContextLengthExceeded) -> None:
        super().__init__(400, str(error), param=error.param, code="context_length_exceeded")
        said = str(error) if error.sizes is None else "{} tokens > {} maximum".format(*error.sizes)
        self._sizes = f": {said}"

    def words(self, path: str) -> str:
        if path.startswith(_ANTHROPIC_PATHS):
            return f"prompt is too long{self._sizes}"
        if path.startswith(_OLLAMA_PATHS):
            return f"the input length exceeds the context length{self._sizes}"
        if path.startswith(_RESPONSES_PATHS):
            return (
                "Your input exceeds the context window of this model. Please adjust your input and try again."
                f" {self.message}"
            )
        return self.message


class ClientLeft(Exception):
    """The connection closed before there was anything to send."""


_CLIENT_LEFT = 499  # nginx's code: counted, never sent
_TYPE_OF_STATUS = {
    401: "authentication_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
_ANTHROPIC_PATHS = "/v1/messages"
_OLLAMA_PATHS = "/api/"
_RESPONSES_PATHS = "/v1/responses"
_ANTHROPIC_TYPE_OF_STATUS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


_TAG = re.compile("str|dict|list( of .*)?", re.DOTALL)
"""A union tag of `schemas.kind_of`, as part of an error's location."""
# Fields of several possible types, where the first mismatch says too little.
_SHAPES = {
    "content": 'a text or a list of parts such as {"type": "text", "text": TEXT}',
    "prompt": "a text, a list of texts, a list of token ids or a list of such lists, and no list empty",
    "tool_choice": 'none, auto, required or {"type": "function", "function": {"name": NAME}}',
    "stop": "a text or a list of at most 16 texts, each of 1 to 256 characters",
}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


@contextmanager
def naming(renamed: Mapping[str, str]) -> Iterator[None]:
    """Rename fields in an ApiError raised inside. `renamed`: name in the error, to name in the request."""
    try:
        yield
    except ApiError as error:
        field = error.param or ""
        if field in renamed:
            error.param = renamed[field]
            error.message = re.sub(rf"^{field}\b", error.param, error.message)
        raise


def other_purpose(asked: str, purpose: str, path: str) -> ApiError:
    """The 404 for a model that is served here for another purpose."""
    message = f"the model {asked[:_MOST_NAME]!r} {purpose}: use {path}"
    return ApiError(404, message, param="model", code="model_not_found")


def unknown_model(asked: str, served: str) -> ApiError:
    message = f"the model {asked[:_MOST_NAME]!r} is not served here; this server has {served!r}"
    return ApiError(404, message, param="model", code="model_not_found")


def from_validation(error: ValidationError) -> ApiError:
    """The first error of a body that failed validation, as a 400 of one line."""
    first = error.errors(include_url=False, include_input=False)[0]
    # Union members and positions follow the field's name; the name is what the sender can look up.
    path = [str(part) for part in first["loc"] if not _TAG.fullmatch(str(part))]
    if first["type"] == "json_invalid":
        return bad_request(f"the body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}")
    where = path[0] if path else None
    if where in _SHAPES:
        return bad_request(f"{where} must be {_SHAPES[where]}", param=where)
    said, name = first["msg"].removeprefix("Value error, "), path[-1] if path else ""
    if first["type"] == "union_tag_invalid":  # its own message has the validation library's words
        context = first.get("ctx", {})
        tag, tags = str(context["tag"])[:_MOST_NAME], context["expected_tags"]
        said = f"type {tag!r} is not taken here, only {tags}"
        said = f"it must be {_SHAPES[name]}" if name in _SHAPES else said
    return bad_request(f"{'.'.join(path) or 'body'}: {said}", param=where)


def from_engine(error: Exception) -> ApiError:
    """The HTTP error for an exception of the engine, chosen by the exception's type."""
    match error:
        case ApiError():
            return error
        case ContextLengthExceeded():
            return PromptTooLong(error)
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


@contextmanager
def engine_errors() -> Iterator[None]:
    """Raise ApiError in place of the engine's errors, and ClientLeft in place of Abandoned."""
    try:
        yield
    except Abandoned as error:
        raise ClientLeft from error
    except ServingError as error:
        raise from_engine(error) from error


def handlers(refused: Callable[[ApiError], None]) -> dict[Any, Any]:
    """Exception handlers by type, which write all errors in one shape. `refused`: gets each ApiError."""

    async def api_error(request: Request, error: ApiError) -> Response:
        refused(error)
        return error.response(request.url.path)

    async def client_left(_request: Request, _error: ClientLeft) -> Response:
        return Response(status_code=_CLIENT_LEFT)

    async def http_error(request: Request, error: HTTPException) -> Response:
        path = request.url.path
        paths = {str(getattr(route, "path", "")) for route in request.app.routes}
        methods = (error.headers or {}).get("Allow", "another")
        asked = f"{request.method} /" if path == "/" else path[:_MOST_NAME]
        status = 404 if path == "/" else error.status_code  # with a page too: a POST is for other servers
        what = {
            404: f"there is no {asked} here: {advice(path, paths)}",
            405: f"{request.method} is not allowed on {asked}: use {methods}",
        }
        response = ApiError(status, what.get(status, str(error.detail))).response(path)
        response.headers.update(error.headers or {})
        return response

    async def surprise(request: Request, error: Exception) -> Response:
        return from_engine(error).response(request.url.path)

    return {ApiError: api_error, ClientLeft: client_left, HTTPException: http_error, Exception: surprise}


_OPENAI = "this server speaks OpenAI's API: POST /v1/chat/completions, or GET /v1/models for what is served"
_OLLAMA = "of Ollama's API there are /api/chat, /api/generate, /api/show, /api/tags, /api/ps and /api/version"
_DOCUMENT = "GET /openapi.json describes the API, and GET /v1/models lists what is served"
_OF_TEXT = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize", "/detokenize"}
    | {"/api/chat", "/api/generate", "/api/tags", "/api/show", "/tokenizer_info"}
)
_OF_VECTORS = frozenset({"/v1/embeddings", "/v1/rerank", "/rerank", "/api/embed"})
_OF_OTHER_SERVERS = ("/api/", "/v1/complete", "/v2/", "/generate", "/completion", "/chat", "/embed", "/infer")
"""Path prefixes of Ollama, Anthropic, llama-server, text-generation-inference and KServe."""


def advice(path: str, paths: Collection[str]) -> str:
    """Advice on the path to use in place of an unknown `path`. `paths`: the paths of this server."""
    asked = path.rstrip("/")
    for near in (asked, f"/v1{asked}", asked.removeprefix("/v1")):
        if near in paths and near != path:
            return f"use {near}"
    if asked in _OF_TEXT:
        return "the model of this server makes vectors and no text: POST /v1/embeddings, or /v1/rerank"
    if asked in _OF_VECTORS:
        return (
            "no embedding model is served here: start a server for one, phasewise serve EMBEDDING_MODEL; "
            "a server of one language model also takes --embed-model"
        )
    if asked == "":
        main = "/v1/chat/completions" if "/v1/chat/completions" in paths else "/v1/embeddings"
        return f"POST {main}; {_DOCUMENT}"
    if asked == "/v1":
        return f"it is where the API begins, the base_url of a client: {_DOCUMENT}"
    if path.startswith("/api/") and "/api/chat" in paths:
        return _OLLAMA
    if path.startswith(_OF_OTHER_SERVERS) and "/v1/chat/completions" in paths:
        return _OPENAI
    return _DOCUMENT
