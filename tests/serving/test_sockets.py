"""Sockets between hosts: a peer with the keys is heard, one without them is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

zmq = pytest.importorskip("zmq")
from phasewise.serving.sockets import Keys, Sockets  # noqa: E402

HEARD_MS, NOT_HEARD_MS = 5000, 300


@pytest.mark.parametrize("fault", [None, "another client's key", "another server's key", "no keys"])
def test_only_a_peer_with_the_keys_is_heard(fault: str | None) -> None:
    keys, others = Keys.new(), Keys.new()
    known: Keys | None = keys
    if fault == "another client's key":
        known = replace(keys, client_public=others.client_public, client_secret=others.client_secret)
    elif fault == "another server's key":
        known = replace(keys, server_public=others.server_public)
    elif fault == "no keys":
        known = None
    with Sockets(keys) as here, Sockets(known) as there:
        listener, endpoint = here.listen(zmq.ROUTER, "tcp://127.0.0.1:*")
        peer = there.connect(zmq.DEALER, endpoint, "me")
        peer.send(b"hello")

        if fault is None:
            assert listener.poll(HEARD_MS)
            assert listener.recv_multipart() == [b"me", b"hello"]
        else:
            assert not listener.poll(NOT_HEARD_MS)


def test_keys_are_new_each_time_and_do_not_print_their_secrets() -> None:
    keys = Keys.new()

    assert keys != Keys.new()
    assert keys.client_secret not in repr(keys)
    assert keys.server_secret not in repr(keys)
