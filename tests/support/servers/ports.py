"""Ports for servers that cannot choose one by themselves."""

from __future__ import annotations

import socket


def reserved_port() -> int:
    """A port of loopback for a server that is started within a minute: the system gives it to nobody else.

    A connection of it has just ended (TIME_WAIT), so that only who names it can listen there.
    """
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", 0))
        listening.listen(1)
        port: int = listening.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            listening.accept()[0].close()  # first, so that the end that waits is this one
    return port
