"""The server that answers a batch: one that runs already, or one of the batch's own behind a Unix socket."""

from __future__ import annotations

import http.client
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from phasewise._files import write_file
from phasewise._options import changed, option, refuse_unused
from phasewise.serving.loaders import is_made_for_embedding
from phasewise.serving.processes.behind_others import end_with_parent
from phasewise.workflows.config_file import config_path, config_text
from phasewise.workflows.errors import UsageError, WorkflowError
from phasewise.workflows.opening.drafts import check_draft
from phasewise.workflows.opening.open_model import check_settings
from phasewise.workflows.opening.settings import Weights
from phasewise.workflows.options import DRAFT, DRAFT_TOKENS, KV_FORMAT, ModelCores
from phasewise.workflows.report import Report

_LOOK_EVERY_S = 0.1
_END_S = 30.0
_NO_PROMISE_MS = 60_000
_API_KEY = "PHASEWISE_API_KEY"
_OTHER_WAYS = ("also", "cluster", "embed_model", "mixed_pool", "models", "prompt_pool", "token_pool")
"""Options by which a server would serve something else than the batch's model on this machine alone."""


@dataclass(frozen=True)
class OwnServing:
    """The way a model is served for one batch."""

    concurrency: int = option(32, "requests at the same time", min=1, max=512, metavar="N")
    draft: str | None = DRAFT(None)
    draft_tokens: int | None = DRAFT_TOKENS(None)
    kv_format: str = KV_FORMAT("auto")


@dataclass(frozen=True)
class OwnServer:
    """A model that is served for one batch, and the options of `phasewise serve` for it."""

    model: str
    weights: Weights
    placement: ModelCores
    answering: OwnServing

    def command(self, report: Report) -> list[str]:
        """The arguments after `phasewise serve`. Raises ModelError for a file that is no model."""
        weight_format, placement, answering = self.weights.weight_format, self.placement, self.answering
        words = [self.model, "--format", weight_format, "--log-level", "error"]
        words += [] if placement.threads is None else ["--threads", str(placement.threads)]
        words += ["--arithmetic", self.weights.arithmetic, "--pack", self.weights.pack]
        if is_made_for_embedding(self.model, weight_format, report=report):
            of_text = [*changed(self.weights, "sparse", "lora"), *changed(placement, "ranks", "db")]
            of_text += changed(answering, "draft", "draft_tokens", "kv_format")
            refuse_unused("where MODEL makes vectors and generates no text", of_text)
            return words
        check_draft(answering.draft, report)
        check_settings(self.model, self.weights, answering.kv_format, report)
        words += ["--sparse", self.weights.sparse, "--batch-bytes", "0"]
        # Nobody waits for a token: prompts and answers take turns by their sizes alone.
        words += ["--tpot", str(_NO_PROMISE_MS), "--max-sequences", str(answering.concurrency)]
        words += ["--kv-format", answering.kv_format]
        words += [word for adapter in self.weights.lora or () for word in ("--lora", adapter)]
        drafting = {"--draft": answering.draft, "--draft-tokens": answering.draft_tokens}
        for flag, value in {"--ranks": placement.ranks, **drafting, "--db": placement.db}.items():
            words += [] if value is None else [flag, str(value)]
        return words


class Response(NamedTuple):
    status: int
    request_id: str
    retry_after_s: float | None
    body: bytes


class Endpoint:
    """The address of a server. `child`: the server's process, where the batch started it."""

    def __init__(self, url: str, key: str | None, child: subprocess.Popen[bytes] | None = None) -> None:
        self._parts = urlsplit(url)
        self._key = key
        self._child = child

    def connect(self) -> http.client.HTTPConnection:
        """Open a connection for use by one thread."""
        if self._parts.scheme == "unix":
            return _UnixConnection(self._parts.path)
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        return kind(self._parts.hostname or "", self._parts.port)

    def post(self, connection: http.client.HTTPConnection, path: str, body: bytes) -> Response:
        """Send a request, wait for its answer. OSError or HTTPException where the server has gone."""
        headers = {"Content-Type": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        connection.request("POST", f"{self._parts.path if self._child is None else ''}{path}", body, headers)
        answer = connection.getresponse()
        given = answer.headers.get("Retry-After", "")
        after_s = float(given) if given.isdigit() else None
        return Response(answer.status, answer.headers.get("X-Request-Id", ""), after_s, answer.read())

    def has_ended(self) -> bool:
        """True if the batch's own server has exited."""
        return self._child is not None and self._child.poll() is not None


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(self._path)


@contextmanager
def endpoint_of(server: str | OwnServer, key: str | None, report: Report) -> Iterator[Endpoint]:
    """Yield a running server's endpoint, or start a server for the batch, which ends with the block.

    UsageError for an invalid address; WorkflowError where the server does not start, which it has explained.
    """
    if isinstance(server, str):
        if urlsplit(server).scheme not in ("http", "https") or not urlsplit(server).hostname:
            raise UsageError(f"--url {server!r} is no address: give one such as http://127.0.0.1:8000")
        endpoint = Endpoint(server.rstrip("/").removesuffix("/v1"), key)
        try:
            endpoint.connect().connect()
        except OSError as error:
            raise WorkflowError(f"{server} cannot be reached: {error.strerror or error}") from None
        yield endpoint
        return
    command = server.command(report)
    key = secrets.token_hex(16)  # whatever the configuration file says of keys
    with tempfile.TemporaryDirectory(prefix="phasewise-batch-") as folder:
        environment = _environment(Path(folder))
        path = Path(folder) / "socket"
        words = [sys.executable, "-m", "phasewise", "serve", *command, "--unix-socket", str(path)]
        child = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={**environment, _API_KEY: key, "PHASEWISE_NO_PAGE": "1"},
            preexec_fn=end_with_parent,
            process_group=0,  # Ctrl-C is the batch's, which ends the server in order
        )
        try:
            endpoint = Endpoint(f"unix://{path}", key, child)
            _await_ready(endpoint, child)
            yield endpoint
        finally:
            _end(child)


def _environment(folder: Path) -> dict[str, str]:
    """This process's environment and configuration (copied to `folder`) without other ways of serving."""
    import tomlkit

    variables = {f"PHASEWISE_{key.upper()}" for key in _OTHER_WAYS}
    environment = {name: value for name, value in os.environ.items() if name not in variables}
    path = config_path()
    if path.exists():
        document = tomlkit.parse(config_text(path))
        table = document.get("serve")
        if isinstance(table, dict):
            for key in _OTHER_WAYS:
                table.pop(key, None)
        own = folder / "config.toml"
        write_file(own, tomlkit.dumps(document))
        environment["PHASEWISE_CONFIG"] = str(own)
    return environment


def _await_ready(endpoint: Endpoint, child: subprocess.Popen[bytes]) -> None:
    while child.poll() is None:
        try:
            connection = endpoint.connect()
            connection.request("GET", "/ready")
            if connection.getresponse().status == http.HTTPStatus.OK:
                return
        except (OSError, http.client.HTTPException):
            pass
        time.sleep(_LOOK_EVERY_S)
    raise WorkflowError(f"the server ended before it was ready, with exit code {child.returncode}")


def _end(child: subprocess.Popen[bytes]) -> None:
    """Terminate the server by SIGTERM, so that it ends its ranks and sandboxes; kill it after _END_S."""
    if child.poll() is None:
        os.kill(child.pid, signal.SIGTERM)
    try:
        child.wait(_END_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
