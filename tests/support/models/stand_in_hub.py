"""A model hub on this machine: what `models pull` asks of the hub's HTTP interface, and its faults."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789" * 4


@dataclass
class StandInHub:
    """Repositories by name, each a dictionary of paths and contents. All may be changed while it serves."""

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    licence: str = "apache-2.0"
    listed: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By path: fields of the list that are not as the contents say."""
    listing: bytes | None = None
    """Sent in place of any list."""
    breaks_after: list[int] = field(default_factory=list)
    """Bytes after which the next answers break off, one number each."""
    statuses: list[int] = field(default_factory=list)
    """Statuses that the next requests for files are answered with."""
    knows_ranges: bool = True
    redirects_to: str | None = None
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    url: str = ""

    def list_of(self, repository: str) -> bytes:
        """The answer of /api/models/REPOSITORY?blobs=true."""
        siblings = []
        for path, content in self.repositories[repository].items():
            sibling: dict[str, Any] = {"rfilename": path, "size": len(content)}
            if path.endswith((".gguf", ".safetensors")):
                sibling["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
            else:
                sibling["blobId"] = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            siblings.append(sibling | self.listed.get(path, {}))
        return json.dumps(
            {"sha": COMMIT, "siblings": siblings, "cardData": {"license": self.licence}}
        ).encode()


class _Handler(BaseHTTPRequestHandler):
    hub: StandInHub

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        hub, path = self.hub, self.path
        hub.requests.append((path, {name.title(): value for name, value in self.headers.items()}))
        if path.startswith("/api/models/"):
            repository = path.removeprefix("/api/models/").partition("?")[0]
            if hub.listing is None and repository not in hub.repositories:
                self._answer(404, b"{}")
                return
            self._answer(200, hub.listing if hub.listing is not None else hub.list_of(repository))
        elif path.startswith("/cdn/"):
            self._file(path.removeprefix("/cdn/"))
        elif hub.redirects_to is not None:
            self._redirect(hub.redirects_to)
        else:
            self._redirect(hub.url.replace("127.0.0.1", "localhost") + "/cdn" + path)

    def _redirect(self, to: str) -> None:
        self.send_response(302)
        self.send_header("Location", to)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _file(self, path: str) -> None:
        repository, _, rest = path.partition("/resolve/")
        content = self.hub.repositories[repository][rest.partition("/")[2]]
        if self.hub.statuses and (status := self.hub.statuses.pop(0)) != 200:
            self._answer(status, b"")
            return
        asked = self.headers.get("Range")
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and self.hub.knows_ranges else 0
        if start >= len(content) > 0:
            self._answer(416, b"")
        elif start:
            self._answer(206, content[start:], f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            self._answer(200, content)

    def _answer(self, status: int, body: bytes, content_range: str = "") -> None:
        self.send_response(status)
        if content_range:
            self.send_header("Content-Range", content_range)
        if status == 403:
            self.send_header("X-Error-Code", "GatedRepo")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        breaks = self.path.startswith("/cdn/") and status in (200, 206) and self.hub.breaks_after
        self.wfile.write(body[: self.hub.breaks_after.pop(0)] if breaks else body)


@contextmanager
def serving() -> Iterator[StandInHub]:
    """A hub that serves at its `url` until the block ends."""
    hub = StandInHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
