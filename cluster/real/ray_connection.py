"""A connection to an existing Ray cluster: the only module that imports `ray`.

A cluster that listens beyond loopback must ask for a token.
"""

from __future__ import annotations

import contextlib
import importlib
import ipaddress
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, TextIO

from phasewise.cluster.errors import ClusterError
from phasewise.serving.processes.behind_others import without_stderr

NAMESPACE = "phasewise"
CONNECT_S = 5.0
PROBE_S = 20.0


@contextlib.contextmanager
def ray_connection(address: str) -> Iterator[str]:
    """Connect to a running cluster; yields the address of this node. ClusterError, in one line, where no
    cluster answers, or where one beyond loopback asks for no token."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = the_ray()
    _check_listens(address)
    was_there = ray.is_initialized()
    stack = contextlib.ExitStack()
    try:
        if not was_there:
            stack.enter_context(contextlib.redirect_stdout(OwnStdout(sys.stdout)))
            with without_stderr():  # Ray's C++ side writes a line a second while a cluster refuses its token
                ray.init(
                    address=address,
                    namespace=NAMESPACE,
                    log_to_driver=False,
                    logging_level="error",
                    configure_logging=False,
                )
    except (ConnectionError, ValueError, RuntimeError) as error:
        line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        remedies = {True: "compare RAY_AUTH_TOKEN with the cluster's", False: "set RAY_AUTH_MODE=token"}
        stack.close()
        hint = f"if it asks for a token, {remedies[_sends_token()]}"
        raise ClusterError(f"the Ray cluster {address!r} cannot be reached: {line}; {hint}") from error
    try:
        node = str(ray.util.get_node_ip_address())
        _check_token(node)
        if not was_there and not ipaddress.ip_address(node).is_loopback:
            _check_asks_for_token(str(ray.get_runtime_context().gcs_address))
        yield node
    finally:
        if not was_there:
            ray.shutdown()
        stack.close()


class OwnStdout:
    """A stdout for our data alone: Ray's threads, which tell a driver of lost nodes, write to stderr."""

    def __init__(self, ours: TextIO) -> None:
        self._ours = ours

    def write(self, text: str) -> int:
        is_rays = threading.current_thread().name.startswith("ray_")
        return (sys.stderr if is_rays else self._ours).write(text)

    def flush(self) -> None:
        self._ours.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ours, name)


def the_ray(part: str = "") -> Any:
    """The module `ray`, or a part of it. ClusterError where it is not installed."""
    try:
        return importlib.import_module(f"ray.{part}" if part else "ray")
    except ImportError:
        raise ClusterError("Ray is not installed: pip install 'phasewise[ray]'") from None


def _check_listens(address: str) -> None:
    """Check that something listens at the address, since Ray itself tries for minutes. For `auto`, the
    address that Ray finds is checked."""
    host, _, port = (_found_by_ray() if address == "auto" else address).rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        return
    try:
        there = socket.create_connection((host.strip("[]"), int(port)), CONNECT_S)
    except (OSError, OverflowError) as error:
        raise ClusterError(f"the Ray cluster {address!r:.80} cannot be reached: {error}") from error
    with there:
        _check_token(str(there.getpeername()[0]))
        check_greets(there, address)


def _found_by_ray() -> str:
    """The address that Ray takes for `auto`; empty where Ray finds none."""
    with contextlib.suppress(ClusterError, AttributeError, ConnectionError, ValueError):
        return str(the_ray("_private.services").canonicalize_bootstrap_address("auto"))
    return ""


def _sends_token() -> bool:
    return os.environ.get("RAY_AUTH_MODE") == "token"


def _check_token(node: str) -> None:
    if ipaddress.ip_address(node).is_loopback or _sends_token():
        return
    raise _asks_for_none(node)


def _asks_for_none(node: str) -> ClusterError:
    return ClusterError(
        f"the Ray cluster listens on {node} and asks for no token, so that every machine that reaches it can "
        "run programs there: start Ray and phasewise with RAY_AUTH_MODE=token"
    )


_WITHOUT_TOKEN = """
import sys
from ray._raylet import GcsClient
GcsClient(address=sys.argv[1]).internal_kv_get(b"phasewise", None, timeout=5)
print("it asks for no token")
"""


def _check_asks_for_token(address: str) -> None:
    """Check that a cluster asks for a token: ClusterError where it answers a process without one. Another
    process asks, since Ray reads its environment once."""
    without = {name: text for name, text in os.environ.items() if not name.startswith("RAY_AUTH_")}
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _WITHOUT_TOKEN, address],
            env={
                **without,
                "RAY_AUTH_MODE": "disabled",
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            },
            capture_output=True,
            timeout=PROBE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return  # it is refused again and again
    if b"it asks for no token" in asked.stdout:
        raise _asks_for_none(address.rpartition(":")[0])


GREETING_S = 5.0
_SETTINGS = 4
_FRAME_HEAD_BYTES = 9
_OPENING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0])
"""Bytes that open an HTTP/2 connection: the preface, and an empty settings frame."""
_TLS_RECORDS = (b"\x15", b"\x16")
"""First bytes of two kinds of TLS records: an alert and a handshake."""
_CERTIFICATES = "RAY_TLS_SERVER_CERT, RAY_TLS_SERVER_KEY and RAY_TLS_CA_CERT"


def check_greets(there: socket.socket, address: str) -> None:
    """Check that Ray answers on a connection within GREETING_S, by TLS if that is set here, and close the
    connection. ClusterError, in one line, where Ray does not."""
    uses_tls = os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")
    deadline_s = time.monotonic() + GREETING_S
    there.settimeout(GREETING_S)
    with contextlib.ExitStack() as stack:
        try:
            if uses_tls:
                there = _context(address).wrap_socket(there)
            stack.enter_context(there)
            there.sendall(_OPENING)
            first = _first_bytes(there, deadline_s)
        except TimeoutError:
            problem = "says nothing"
        except OSError as error:
            problem = f"does not answer as Ray does ({error.strerror or error})"
        else:
            if len(first) == _FRAME_HEAD_BYTES and first[3] == _SETTINGS:
                return
            problem = _problem(first)
    hint = (
        f"RAY_USE_TLS is set here: compare it, {_CERTIFICATES} with the cluster's"
        if uses_tls
        else f"if it was started with RAY_USE_TLS=1, set that here too, with {_CERTIFICATES}"
    )
    raise ClusterError(f"the Ray cluster {address!r:.80} {problem}; {hint}")


def _problem(first: bytes) -> str:
    if not first:
        return "closes the connection"
    return "speaks TLS" if first[:1] in _TLS_RECORDS else "does not answer as Ray does"


def _first_bytes(there: socket.socket, deadline_s: float) -> bytes:
    """Read the head of the other side's first frame, or less if it closes. TimeoutError at the deadline."""
    first = b""
    while len(first) < _FRAME_HEAD_BYTES and first[:1] not in _TLS_RECORDS:
        there.settimeout(max(1e-3, deadline_s - time.monotonic()))
        received = there.recv(_FRAME_HEAD_BYTES - len(first))
        if not received:
            break
        first += received
    return first


def _context(address: str) -> ssl.SSLContext:
    """The TLS context of Ray's own clients: it shows a certificate, trusts heads of the cluster's authority,
    and accepts any host name."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.set_alpn_protocols(["h2"])
    try:
        context.load_verify_locations(os.environ["RAY_TLS_CA_CERT"])
        context.load_cert_chain(os.environ["RAY_TLS_SERVER_CERT"], os.environ["RAY_TLS_SERVER_KEY"])
    except (OSError, KeyError) as error:
        raise ClusterError(
            f"the Ray cluster {address!r:.80} is not asked: RAY_USE_TLS is set, and {_CERTIFICATES} do not "
            f"name certificates ({error})"
        ) from error
    return context
