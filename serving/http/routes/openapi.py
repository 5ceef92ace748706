"""Declared routes, and the OpenAPI document made from them. The document takes its schemas from the models
that validate request bodies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from importlib import resources
from importlib.metadata import version
from typing import Any, TypeVar

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from phasewise.serving.http.errors import ApiError

Json = dict[str, Any]
Endpoint = TypeVar("Endpoint", bound=Callable[..., Awaitable[Response | Json]])

REFUSALS = {
    400: "the request is not one that can be answered",
    401: "the key that this server asks for is missing or wrong",
    404: "there is no such path, model or response here",
    403: "a page of another origin may not do this",
    405: "the path does not take this method",
    408: "the request did not come in time",
    409: "what is asked for is in use, or over already",
    413: "the body is larger than this server takes",
    415: "the body's Content-Type is not JSON",
    421: "the request names a host that this server does not answer for",
    429: "too much is waiting already; Retry-After says when to come again",
    431: "the head of the request is too large",
    500: "the computation failed",
    503: "the server is starting, stopping or full, or has lost its engine; Retry-After says when",
    507: "files of batches take all the room that there is for them",
}


class DocumentedRoute(Route):
    """A route of the OpenAPI document. `body`: the model of its JSON body, or a JSON schema of its form.
    `query`: names of its query parameters."""

    def __init__(
        self,
        path: str,
        endpoint: Callable[..., Awaitable[Response | Json]],
        method: str,
        body: type[BaseModel] | Json | None,
        query: tuple[str, ...],
    ) -> None:
        async def answer(request: Request) -> Response:
            said = await endpoint(request, **request.path_params)
            return said if isinstance(said, Response) else JSONResponse(said)

        super().__init__(path, answer, methods=[method], name=endpoint.__name__)
        self.method = method.lower()
        self.body = body
        self.query = query
        self.summary = " ".join((endpoint.__doc__ or "").split()).partition(". ")[0].rstrip(".")

    def operation(self) -> Json:
        """The route's operation object in the OpenAPI document."""
        told: Json = {
            "operationId": f"{self.name}{self.path_format}".translate(_PLAIN),
            "summary": self.summary,
            "parameters": [
                *({"name": name, "in": "path", "required": True, **_TEXT} for name in self.param_convertors),
                *({"name": name, "in": "query", **_TEXT} for name in self.query),
            ],
            "responses": {
                "200": {"description": "the answer"},
                **{str(status): {"$ref": f"#/components/responses/{status}"} for status in REFUSALS},
            },
        }
        if self.body is None:
            return told
        if isinstance(self.body, dict):
            content = {"multipart/form-data": {"schema": self.body}}
        else:
            content = {"application/json": {"schema": {"$ref": _REFERENCE.format(model=self.body.__name__)}}}
        return {**told, "requestBody": {"required": True, "content": content}}


_PLAIN = str.maketrans("/{}.-", "_____")
_TEXT = {"schema": {"type": "string", "minLength": 1}}
_REFERENCE = "#/components/schemas/{model}"


class Routes(list[BaseRoute]):
    """The routes of one application, declared by the decorator `add`."""

    def add(
        self, path: str, method: str, body: type[BaseModel] | Json | None = None, query: tuple[str, ...] = ()
    ) -> Callable[[Endpoint], Endpoint]:
        """Decorator for the handler of `path`: a function of the request and the path's parameters that
        returns a response or JSON. The first sentence of its docstring is the summary in the document."""

        def declare(endpoint: Endpoint) -> Endpoint:
            self.append(DocumentedRoute(path, endpoint, method, body, query))
            return endpoint

        return declare

    @property
    def paths(self) -> frozenset[str]:
        """The paths without parameters."""
        return frozenset(route.path for route in self if isinstance(route, Route) and "{" not in route.path)


def document(routes: Iterable[BaseRoute]) -> Json:
    """The OpenAPI document of the routes that have a summary."""
    told = [route for route in routes if isinstance(route, DocumentedRoute) and route.summary]
    kinds = {route.body: None for route in told if isinstance(route.body, type)}
    _, bodies = models_json_schema([(kind, "validation") for kind in kinds], ref_template=_REFERENCE)
    paths: defaultdict[str, Json] = defaultdict(dict)
    for route in told:
        paths[route.path_format][route.method] = route.operation()
    return {
        "openapi": "3.1.0",
        "info": {"title": "phasewise", "version": version("phasewise")},
        "paths": dict(paths),
        "components": {
            "schemas": bodies.get("$defs", {}),
            "responses": {str(status): {"description": words} for status, words in REFUSALS.items()},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob: data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
"""Content-Security-Policy of the web page: nothing from other hosts, and no inline script or style."""
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_NAMES = ("page.css", "page.js", "chat.js", "markdown.js", "server.js")

OPEN_PATHS = frozenset({"/", *(f"/page/{name}" for name in _NAMES)})
"""Paths that a browser may fetch without an API key: they say nothing of the model, nor of its users."""


def add_page(routes: Routes) -> None:
    """Add the routes of the web page."""
    folder = resources.files("phasewise.serving.http").joinpath("page")
    files = {name: folder.joinpath(name).read_bytes() for name in ("index.html", *_NAMES)}

    @routes.add("/", "GET")
    async def index(_request: Request) -> Response:
        return _response("index.html", files["index.html"])

    @routes.add("/page/{name}", "GET")
    async def file(_request: Request, name: str) -> Response:
        if name not in _NAMES:
            raise ApiError(404, "the page has no such file")
        return _response(name, files[name])


def _response(name: str, content: bytes) -> Response:
    kind = _TYPES[name[name.rindex(".") :]]
    return Response(content, media_type=f"{kind}; charset=utf-8", headers=_HEADERS)
