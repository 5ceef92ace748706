"""Sockets between hosts: a peer with the keys is heard, one without them is not."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from dataclasses import replace

import pytest
import zmq

from phasewise.serving.processes.sockets import HANDSHAKE_MS, Keys, Sockets

HEARD_MS, NOT_HEARD_MS = 5000, 300


@pytest.mark.parametrize("fault", [None, "another client's key", "another server's key", "no keys"])
def test_only_a_peer_with_the_keys_is_heard(fault: str | None) -> None:
    keys, others = Keys.new(), Keys.new()
    peer_keys: Keys | None = keys
    if fault == "another client's key":
        peer_keys = replace(keys, client_public=others.client_public, client_secret=others.client_secret)
    elif fault == "another server's key":
        peer_keys = replace(keys, server_public=others.server_public)
    elif fault == "no keys":
        peer_keys = None
    with Sockets(keys) as here, Sockets(peer_keys) as there:
        listener, endpoint = here.listen(zmq.ROUTER, "tcp://127.0.0.1:*")
        peer = there.connect(zmq.DEALER, endpoint, "me")
        peer.send(b"hello")

        if fault is None:
            assert listener.poll(HEARD_MS)
            assert listener.recv_multipart() == [b"me", b"hello"]
        else:
            assert not listener.poll(NOT_HEARD_MS)


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_what_passes_between_hosts_cannot_be_read_on_the_way(is_encrypted: bool) -> None:
    """By one who passes it on. Without keys, as on one host, it could be: the test would notice."""
    keys = Keys.new() if is_encrypted else None
    said = b"a prompt that is nobody else's " * 20
    passed: list[bytes] = []
    with contextlib.ExitStack() as stack:
        here, there = stack.enter_context(Sockets(keys)), stack.enter_context(Sockets(keys))
        listener, endpoint = here.listen(zmq.PULL, "tcp://127.0.0.1:*")
        between = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        passing = threading.Thread(target=pass_on, args=(between, int(endpoint.rpartition(":")[2]), passed))
        passing.start()
        peer = there.connect(zmq.PUSH, f"tcp://127.0.0.1:{between.getsockname()[1]}")
        peer.send(said)
        assert listener.poll(60_000)
        assert listener.recv() == said
        peer.close()
        listener.close()
    passing.join(60)

    assert (said[:20] in b"".join(passed)) is not is_encrypted
    assert sum(map(len, passed)) > len(said)


def pass_on(between: socket.socket, port: int, passed: list[bytes]) -> None:
    """One connection, both ways, until a side closes."""
    client, _ = between.accept()
    with client, socket.create_connection(("127.0.0.1", port)) as server:
        others = {client: server, server: client}
        while True:
            for side in select.select([client, server], [], [], 60.0)[0]:
                part = side.recv(1 << 16)
                if not part:
                    return
                passed.append(part)
                others[side].sendall(part)


def test_keys_are_new_each_time_and_do_not_print_their_secrets() -> None:
    keys = Keys.new()

    assert keys != Keys.new()
    assert keys.client_secret not in repr(keys)
    assert keys.server_secret not in repr(keys)


GREETING = bytes([0xFF, 0, 0, 0, 0, 0, 0, 0, 1, 0x7F, 3, 1]) + b"CURVE".ljust(20, b"\0") + bytes(32)
STRANGERS = {
    "nothing": b"",
    "HTTP": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "zeros": bytes(4096),
    "half a greeting": GREETING[:11],
    "a greeting": GREETING,
    "a frame of any size": GREETING + b"\x06" + (1 << 62).to_bytes(8, "big") + b"a" * 1000,
    "a false hello": GREETING + b"\x04\xc8\x05HELLO" + bytes(194),
    "a ready without keys": GREETING + b"\x04\x29\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER",
}


def test_strangers_at_the_port_are_not_heard_and_keep_nobody_out() -> None:
    """Many of each kind hold their connections; a peer with the keys comes behind them, and is heard."""
    keys = Keys.new()
    with contextlib.ExitStack() as stack:
        here, there = stack.enter_context(Sockets(keys)), stack.enter_context(Sockets(keys))
        listener, endpoint = here.listen(zmq.ROUTER, "tcp://127.0.0.1:*")
        assert listener.handshake_ivl == HANDSHAKE_MS
        port = int(endpoint.rpartition(":")[2])
        for sent in [*STRANGERS.values()] * 20:
            link = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
            with contextlib.suppress(OSError):
                link.sendall(sent)
        there.connect(zmq.DEALER, endpoint, "me").send(b"hello")

        assert listener.poll(60_000)
        assert listener.recv_multipart() == [b"me", b"hello"]
        assert not listener.poll(300)
