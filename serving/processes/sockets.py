"""ZeroMQ sockets between the processes of one server, encrypted and authenticated between hosts.

On one host they are Unix sockets in a folder that only this user can enter. Between hosts they are TCP with
CURVE: at each start the front makes a key pair for listeners and one for connecting peers, and gives both to
its instances; a peer without the keys is ignored.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field

import zmq
from zmq.auth.thread import ThreadAuthenticator

MOST_MESSAGE_BYTES = 256 << 20
LINGER_MS = 500
HANDSHAKE_MS = 10_000
"""Time after which a peer that has not shown its keys is disconnected; ZeroMQ's default is half a minute."""


@dataclass(frozen=True, slots=True)
class Keys:
    """CURVE keys in Z85: one pair for all listening sockets, one for all connecting sockets."""

    server_public: str
    server_secret: str = field(repr=False)
    client_public: str
    client_secret: str = field(repr=False)

    @classmethod
    def new(cls) -> Keys:
        server, client = zmq.curve_keypair(), zmq.curve_keypair()
        return cls(*(key.decode() for key in (*server, *client)))


def has_input(socket: zmq.Socket[bytes]) -> bool:
    """True if a message can be received at once."""
    return bool(int(socket.get(zmq.EVENTS)) & zmq.POLLIN)


class _OneClient:
    """Admits peers that hold the clients' one public key (`configure_curve_callback`)."""

    def __init__(self, public: str) -> None:
        self._public = public.encode()

    def callback(self, domain: str, key: bytes) -> bool:
        del domain
        return hmac.compare_digest(key, self._public)


class Sockets:
    """The sockets of one process, closed by `close` or `with`. `keys`: CURVE keys; None on one host."""

    def __init__(self, keys: Keys | None) -> None:
        self._keys = keys
        self.context = zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        if keys is not None:
            self._authenticator = ThreadAuthenticator(self.context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback("*", _OneClient(keys.client_public))

    def listen(self, kind: int, endpoint: str) -> tuple[zmq.Socket[bytes], str]:
        """A socket bound to `endpoint` (port `*`: any free one), and the endpoint for peers to connect to."""
        socket = self._socket(kind)
        if self._keys is not None:
            socket.curve_server = True
            socket.curve_publickey = self._keys.server_public.encode()
            socket.curve_secretkey = self._keys.server_secret.encode()
        socket.bind(endpoint)
        return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def connect(
        self, kind: int, endpoint: str, identity: str | None = None, most_unsent: int | None = None
    ) -> zmq.Socket[bytes]:
        """A socket connected to `endpoint`. `most_unsent`: most messages that may queue; None: any number."""
        socket = self._socket(kind)
        socket.sndhwm = most_unsent or 0
        if identity is not None:
            socket.setsockopt_string(zmq.IDENTITY, identity)
        if self._keys is not None:
            socket.curve_serverkey = self._keys.server_public.encode()
            socket.curve_publickey = self._keys.client_public.encode()
            socket.curve_secretkey = self._keys.client_secret.encode()
        socket.connect(endpoint)
        return socket

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self.context.socket(kind)
        socket.linger = LINGER_MS
        socket.rcvhwm = 0
        socket.maxmsgsize = MOST_MESSAGE_BYTES
        socket.handshake_ivl = HANDSHAKE_MS
        return socket

    def close(self) -> None:
        """Close every socket; messages sent last have `LINGER_MS` to leave."""
        if self._authenticator is not None:
            self._authenticator.stop()
        self.context.destroy(LINGER_MS)

    def __enter__(self) -> Sockets:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()
