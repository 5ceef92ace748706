"""ASGI middleware around every route: Host check, API keys, and the record and count of answers."""

from __future__ import annotations

import hashlib
import re
import secrets
import threading
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from phasewise.serving.http.errors import ApiError
from phasewise.serving.http.monitoring.access_log import RECORD, AccessLog, Record, record_of
from phasewise.serving.http.monitoring.metrics import Metrics
from phasewise.serving.http.transport.connection import refused_status

_CLIENT = "phasewise.client"
"""Key of the client's API key digest in an ASGI scope."""
_SHADOW = "phasewise.shadow"
"""Key in an ASGI scope of the owner of a batch, for a line that this process sends. No connection sets it."""

_OPEN_PATHS = frozenset({"/health", "/ready"})
_GIVEN_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


@dataclass(frozen=True, slots=True)
class ClientIdentity:
    """The client of a request for shares and queues: an API key, else an address. `cache_space`: requests of
    one space may reuse each other's KV cache: those with one API key, or all if none is required."""

    name: str
    cache_space: str
    in_shadow: bool = False
    """True for a line of a batch, which has turns and shares of its own."""


ANYONE = ClientIdentity("", "")


def shadow_scope(path: str, owner: str) -> Scope:
    """The ASGI scope of a line of a batch. `owner`: the `cache_space` of the batch's sender."""
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "server": None,
        _SHADOW: owner,
    }


def client_of(scope: Scope) -> ClientIdentity:
    owner: str | None = scope.get(_SHADOW)
    if owner is not None:
        return ClientIdentity(f"batch {owner}", owner, in_shadow=True)
    key: str | None = scope.get(_CLIENT)
    if key is not None:
        return ClientIdentity(f"key {key}", key)
    address = scope.get("client")
    return ClientIdentity(f"address {address[0]}" if address else "local", "")


class ApiKeys:
    """The API keys of one server, stored as digests. They may be replaced from any thread."""

    def __init__(self, keys: Sequence[str]) -> None:
        self.replace(keys)

    def replace(self, keys: Sequence[str]) -> None:
        """Accept only these keys from now on; requests in progress continue."""
        labels = [getattr(key, "label", "") or f"key-{place}" for place, key in enumerate(keys, start=1)]
        self._labels = {_digest(key.encode()): label for key, label in zip(keys, labels, strict=True)}

    def label_of(self, digest: str) -> str:
        """The label of a key in logs and counters; empty if the key is unknown or was removed."""
        return self._labels.get(bytes.fromhex(digest), "")

    def digest_of(self, token: str) -> str | None:
        """The digest of an API key; None if the key is unknown. Compares the digest with every known one in
        constant time, so that timing reveals nothing of a key."""
        given = _digest(token.encode("latin-1", "replace"))
        matches = [secrets.compare_digest(given, key) for key in self._labels]
        return given.hex() if any(matches) else None


class RequireKey:
    """Answers 401 unless the request carries one of `keys`, as a bearer token or in `x-api-key`. Health,
    readiness and `also_open` need no key."""

    def __init__(
        self, app: ASGIApp, keys: ApiKeys, metrics: Metrics, also_open: frozenset[str] = frozenset()
    ) -> None:
        self._app = app
        self._open_paths = _OPEN_PATHS | also_open
        self._keys = keys
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is not None:
            self._metrics.refused(refusal)
        await (self._app if refusal is None else refusal.response(scope["path"]))(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        """The 401 of a request without a known key; None where the key, which is noted, lets it in."""
        if scope["method"] in ("GET", "HEAD") and scope["path"] in self._open_paths:
            return None
        headers = Headers(scope=scope)
        key: str | None = scope.get(_SHADOW)
        if key is None:
            key = scope[_CLIENT] = self._key_of(headers)
        if key is not None:
            record_of(scope).key = self._keys.label_of(key)
            return None
        is_given = headers.get("authorization", "").lower().startswith("bearer ") or "x-api-key" in headers
        message = (
            "the API key is wrong: this server does not know it"
            if is_given
            else "an API key is needed: send the header Authorization: Bearer KEY"
        )
        return ApiError(401, message, code="invalid_api_key", closes=True)

    def _key_of(self, headers: Headers) -> str | None:
        """The digest of the request's API key; None if it has none or an unknown one."""
        if "x-api-key" in headers and "authorization" not in headers:
            return self._keys.digest_of(headers["x-api-key"].strip())
        scheme, _, token = headers.get("authorization", "").partition(" ")
        digest = self._keys.digest_of(token.strip())
        return digest if scheme.lower() == "bearer" else None


_BELOW_V1 = frozenset(
    {"chat", "completions", "responses", "messages", "models", "embeddings", "files", "batches"}
)


class RecordRequests:
    """The outermost middleware: gives each request a record and an id (its X-Request-Id, if valid), counts
    answers by path and status, and once the answer is sent releases the models that it held and passes the
    record to `log`. Paths of OpenAI's and Anthropic's APIs also work without `/v1`, which some clients leave
    out. `name_of`: the path's name in counters and log. An unhandled exception counts as 500, which the
    framework sends outside of this layer.

    Answers 421 unless the request's Host is one of `hosts`, names or addresses without a port; empty: any. A
    web page may send requests to any address that its origin's name resolves to, so also to a server that
    listens on loopback only (DNS rebinding). Such requests name the page's host."""

    def __init__(
        self,
        app: ASGIApp,
        log: AccessLog | None,
        metrics: Metrics,
        name_of: Callable[[str], str],
        hosts: frozenset[str],
    ) -> None:
        self._app = app
        self._log = log
        self._metrics = metrics
        self._name_of = name_of
        self._hosts = frozenset(host.strip("[]").rstrip(".").lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"].removeprefix("/").partition("/")[0] in _BELOW_V1:
            scope["path"] = f"/v1{scope['path']}"
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _GIVEN_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"
        path = self._name_of(scope["path"])
        record = scope[RECORD] = Record(request_id, scope["method"], path)
        record.address = scope["client"][0] if scope.get("client") else ""

        async def recorded(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = refused_status(scope) or message["status"]
                headers = MutableHeaders(raw=message["headers"])
                headers.append("X-Request-Id", request_id)
                if record.ignored:
                    headers.append("X-Ignored-Fields", ",".join(record.ignored))
            await send(message)

        try:
            await self._answering(scope)(scope, receive, recorded)
        except ClientDisconnect:  # it has left without an answer, or has one from its connection
            record.status = record.status or refused_status(scope)
            raise
        except Exception:
            record.status = record.status or 500
            raise
        finally:
            for release in record.releases:
                release(record.keep_s)
            if record.status is not None:
                self._metrics.http.labels(path, record.status).inc()
            if self._log is not None:
                self._log.ended(record)

    def _answering(self, scope: Scope) -> ASGIApp:
        """The application, or the refusal of a host."""
        named = _host_in(Headers(scope=scope).get("host", ""))
        if not self._hosts or named in self._hosts or _SHADOW in scope:
            return self._app
        message = "this server does not answer for the host that the request names; see --allowed-host"
        error = ApiError(421, message, code="host_not_allowed", closes=True)
        self._metrics.refused(error)
        return error.response(scope["path"])


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _host_in(header: str) -> str:
    """The host of a Host header: `localhost` of `LocalHost:8000`, `::1` of `[::1]:8000`."""
    host = header.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".")


ReadKeys = Callable[[], tuple[str, ...] | None]
"""Reads all API keys anew; None if that failed, which has been reported."""


def on_hangup(
    reopened: Iterable[Callable[[], None]],
    keys: ApiKeys,
    read: ReadKeys | None,
    read_tls: Callable[[], None] | None = None,
) -> Callable[[], None] | None:
    """The handler of SIGHUP; None if there is nothing to do. `reopened`: functions that reopen log files.
    `read`: reads the API keys again. `read_tls`: reads the TLS certificate and key again. Files are read on a
    thread, because they may be on a slow file system."""
    opens = tuple(reopened)
    if not opens and read is None and read_tls is None:
        return None

    in_turn = threading.Lock()  # an older read must not replace a newer one

    def read_again() -> None:
        with in_turn:
            if read_tls is not None:
                read_tls()
            if read is not None and (now := read()) is not None:
                keys.replace(now)

    def hang_up() -> None:
        for reopen in opens:
            reopen()
        if read is not None or read_tls is not None:
            threading.Thread(target=read_again, name="phasewise-keys", daemon=True).start()

    return hang_up
