"""The address and limits of a server: from settings to limits, TLS and an address."""

from __future__ import annotations

import re
import stat
from pathlib import Path

from phasewise._files import read_input
from phasewise.serving.http.http_settings import ApiKey, HttpLimits
from phasewise.serving.http.routes.middleware import ReadKeys
from phasewise.serving.http.transport.listening import (
    Address,
    TcpAddress,
    TlsContext,
    UnixAddress,
    allow_many_connections,
    allowed_hosts,
    is_loopback,
    tls_context,
)
from phasewise.workflows.errors import UsageError, WorkflowError
from phasewise.workflows.report import Report
from phasewise.workflows.serve.settings import Accepting, Listening

MAX_KEY_FILE_BYTES = 1 << 20
MAX_KEY_CHARS = 4096
LABEL = re.compile(r"# *name: *([A-Za-z0-9_.-]{1,64})")


def http_limits(listening: Listening, accepting: Accepting, report: Report) -> HttpLimits:
    n_live = accepting.max_sequences + accepting.max_waiting
    host = None if listening.unix_socket else listening.host
    return HttpLimits(
        api_keys=_keys(accepting, report),
        allowed_hosts=allowed_hosts(host, listening.allowed_host or ()),
        max_body_bytes=accepting.max_body_bytes,
        max_unfinished_bytes=accepting.max_unfinished_bytes,
        max_live_requests=n_live,
        max_waiting_requests=accepting.max_waiting,
        max_connections=min(allow_many_connections(), accepting.max_connections),
        max_connections_per_address=accepting.max_connections_per_address,
        max_sequences_per_key=accepting.max_sequences_per_key or max(1, n_live * 3 // 4),
        max_response_bytes=accepting.max_response_bytes,
        drain_s=accepting.drain_s,
    )


def reader_of_keys(accepting: Accepting, report: Report) -> ReadKeys | None:
    """A function that reads all keys again and reports the outcome; None where no file holds keys."""
    path = accepting.api_key_file
    if path is None:
        return None

    def read() -> tuple[str, ...] | None:
        try:
            keys = _keys(accepting, report)
        except WorkflowError as error:
            report(f"the API keys stay as they were: {error}")
            return None
        report(f"API keys read again: {len(keys)}, with those in {path}")
        return keys

    return read


def _keys(accepting: Accepting, report: Report) -> tuple[str, ...]:
    file = accepting.api_key_file
    keys = (*(accepting.api_key or ()), *(_keys_in(file, report) if file else ()))
    if "" in keys:
        raise UsageError("an API key must not be empty")
    return keys


def _keys_in(path: Path, report: Report) -> list[str]:
    """Read a file of keys, one a line; lines with # are none, but `# name: LABEL` names the next key."""
    try:
        text = read_input(path, MAX_KEY_FILE_BYTES).decode()
    except OSError as error:
        raise WorkflowError(f"the API key file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise WorkflowError(f"the API key file {path} is not UTF-8 text") from None
    _warn_readable(path, "API keys", report)
    keys: list[str] = []
    label = ""
    for line in (line.strip() for line in text.splitlines()):
        if line.startswith("#"):
            named = LABEL.fullmatch(line)
            label = named[1] if named else ""
        elif line:
            keys.append(ApiKey(line, label))
            label = ""
    if any(len(key) > MAX_KEY_CHARS or not key.isprintable() for key in keys):
        raise WorkflowError(
            f"the API key file {path} has a key that no request can carry: give at most {MAX_KEY_CHARS} "
            "printable characters a line"
        )
    if not keys:
        raise WorkflowError(f"the API key file {path} has no key; write one a line, or leave the option out")
    return keys


def tls_of(listening: Listening, report: Report) -> TlsContext | None:
    certificate, key = listening.tls_cert, listening.tls_key
    if certificate is None and key is None:
        return None
    if certificate is None:
        raise UsageError("--tls-key needs --tls-cert")
    context = tls_context(certificate, key)
    _warn_readable(key or certificate, "TLS key", report)
    return context


def _warn_readable(path: Path, secret: str, report: Report) -> None:
    if path.stat().st_mode & stat.S_IROTH:
        report(f"warning: everybody on this machine can read the {secret} in {path}; chmod 600 it")


def address_of(listening: Listening, tls: TlsContext | None) -> Address:
    if listening.unix_socket is not None:
        return UnixAddress(listening.unix_socket)
    return TcpAddress(listening.host, listening.port, secure=tls is not None)


def warn_of_strangers(listening: Listening, limits: HttpLimits, report: Report) -> None:
    if limits.api_keys or listening.unix_socket is not None or is_loopback(listening.host):
        return
    report(
        f"warning: every machine that reaches {listening.host} port {listening.port} can use this server: it "
        "asks for no key; set PHASEWISE_API_KEY or --api-key-file, or listen on 127.0.0.1"
    )
