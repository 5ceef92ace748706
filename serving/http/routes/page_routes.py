"""The page at `/`: its files, and what its live view asks for."""

from __future__ import annotations

from importlib import resources

from starlette.requests import Request
from starlette.responses import Response

from phasewise.serving.http.answers.client import EngineClient
from phasewise.serving.http.errors import ApiError
from phasewise.serving.http.monitoring.live import LiveView, MachineFacts
from phasewise.serving.http.routes.openapi import Json, Routes
from phasewise.serving.http.transport.server import Lifecycle

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
"""Content-Security-Policy: nothing from other hosts, and no script or style within the page itself."""
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_NAMES = ("page.css", "page.js", "chat.js", "live.js", "markdown.js", "server.js")

OPEN_PATHS = frozenset({"/", *(f"/page/{name}" for name in _NAMES)})
"""Files that a browser may have without a key: they say nothing of the model, nor of those who use it."""


def add_page(
    routes: Routes, live: LiveView, client: EngineClient, life: Lifecycle, facts: MachineFacts
) -> None:
    """Serve the page and its live view."""
    files = {name: _file(name) for name in ("index.html", *_NAMES)}

    @routes.add("/", "GET")
    async def index(_request: Request) -> Response:
        return _response("index.html", files["index.html"])

    @routes.add("/page/{name}", "GET")
    async def file(_request: Request, name: str) -> Response:
        if name not in _NAMES:
            raise ApiError(404, "the page has no such file")
        return _response(name, files[name])

    @routes.add("/live", "GET")
    async def now(_request: Request) -> Json:
        """The engine's work now, for the page's live view."""
        return live.fields(client.load, life.state)

    @routes.add("/live/machine", "GET")
    async def machine(_request: Request) -> Json:
        """The machine's picture and the schedules in use."""
        return {"machine_svg": facts.machine_svg, "schedules": list(facts.schedules)}


def _file(name: str) -> bytes:
    return resources.files("phasewise.serving.http").joinpath("page", name).read_bytes()


def _response(name: str, content: bytes) -> Response:
    kind = _TYPES[name[name.rindex(".") :]]
    return Response(content, media_type=f"{kind}; charset=utf-8", headers=_HEADERS)
