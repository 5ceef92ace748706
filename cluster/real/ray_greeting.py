"""The first word of a Ray cluster's head, before Ray is asked, which would try for minutes to hear one.

Ray speaks gRPC. A gRPC server answers the opening of HTTP/2 with a frame of settings at once, whatever it
asks for later. A head that was started with RAY_USE_TLS gives no such answer to a plain opening, and a plain
head none to a handshake.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import time

from phasewise.cluster.errors import ClusterError

GREETING_S = 5.0
_SETTINGS = 4
_FRAME_HEAD_BYTES = 9
_OPENING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0])
"""The preface of HTTP/2, and a frame of settings without any."""
_TLS_RECORDS = (0x15, 0x16)
"""First bytes of an alert and of a handshake."""
_CERTIFICATES = "RAY_TLS_SERVER_CERT, RAY_TLS_SERVER_KEY and RAY_TLS_CA_CERT"


def check_greets(there: socket.socket, address: str) -> None:
    """ClusterError, in one line, where no Ray is heard on a connection in GREETING_S, by TLS if that is set
    here. Takes the connection, and closes it.
    """
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
    return "speaks TLS" if first[0] in _TLS_RECORDS else "does not answer as Ray does"


def _first_bytes(there: socket.socket, deadline_s: float) -> bytes:
    """The head of its first frame, or less where it closes. TimeoutError at the deadline."""
    first = b""
    while len(first) < _FRAME_HEAD_BYTES:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        there.settimeout(left_s)
        received = there.recv(_FRAME_HEAD_BYTES - len(first))
        if not received:
            break
        first += received
        if first[0] in _TLS_RECORDS:
            break
    return first


def _context(address: str) -> ssl.SSLContext:
    """As Ray's own clients: with a certificate, for heads of the cluster's authority; for any host's name."""
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
