"""Ports, Unix sockets and TLS: what is served on them, what is refused, and what is left behind."""

from __future__ import annotations

import os
import resource
import socket
import ssl
import stat
from pathlib import Path

import httpx
import pytest

from phasewise.serving.http.http_settings import HttpLimits
from phasewise.serving.http.transport.listening import (
    CannotListen,
    TcpAddress,
    UnixAddress,
    allow_many_connections,
    allowed_hosts,
    tls_context,
)
from tests.support.servers.fake_server import fake_server
from tests.support.servers.rude_clients import connect, read_to_end, until

TLS = Path(__file__).parents[3] / "data" / "tls"


def over(path: Path) -> httpx.Client:
    return httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://phasewise", timeout=60)


def test_a_unix_socket_serves_and_is_gone_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "serve.sock"

    with fake_server(address=UnixAddress(path)) as server, over(path) as client:
        assert server.url == f"unix:{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        assert client.get("/ready").status_code == 200
        answer = client.post(
            "/v1/completions", json={"model": "fake", "prompt": "a", "max_tokens": 3, "temperature": 0}
        )
        assert answer.json()["choices"][0]["text"] == "bcd"

    assert not path.exists()


def test_what_a_killed_server_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "serve.sock"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))

    with fake_server(address=UnixAddress(path)), over(path) as client:
        assert client.get("/health").status_code == 200


def test_a_socket_that_somebody_serves_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "serve.sock"

    with fake_server(address=UnixAddress(path)), over(path) as client:
        with pytest.raises(CannotListen, match="is in use"):
            UnixAddress(path)
        assert client.get("/health").status_code == 200


def test_of_two_that_want_a_socket_at_once_one_gets_it(tmp_path: Path) -> None:
    path = tmp_path / "serve.sock"
    with UnixAddress(path) as first, UnixAddress(path) as second:
        first.listen()
        with pytest.raises(CannotListen, match="is in use"):
            second.listen()
        second.__exit__()

        assert path.exists()


def test_a_socket_made_anew_by_another_server_stays(tmp_path: Path) -> None:
    path = tmp_path / "serve.sock"
    with UnixAddress(path) as first:
        first.listen()
        path.unlink()
        with UnixAddress(path) as second:
            second.listen()
            first.__exit__()
            assert path.exists()

    assert not path.exists()


@pytest.mark.parametrize(
    ("name", "why"),
    [("file", "no socket"), ("missing/serve.sock", "no directory"), ("x" * 200, "longer than")],
)
def test_paths_that_are_no_place_for_a_socket(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "file").write_text("precious")

    with pytest.raises(CannotListen, match=why) as caught:
        UnixAddress(tmp_path / name)

    assert str(tmp_path / name) in str(caught.value)
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)

    with pytest.raises(CannotListen, match="not writable"):
        UnixAddress(tmp_path / "serve.sock")


def test_https_with_a_certificate_of_ones_own() -> None:
    context = tls_context(TLS / "cert.pem", TLS / "key.pem")
    trusting = ssl.create_default_context(cafile=TLS / "cert.pem")

    with fake_server(address=TcpAddress("127.0.0.1", 0, secure=True), tls=context) as server:
        assert server.url.startswith("https://")
        with httpx.Client(verify=trusting, base_url=server.url, timeout=60) as client:
            assert client.get("/ready").status_code == 200
            body = {"model": "fake", "prompt": "a", "max_tokens": 400, "stream": True, "ignore_eos": True}
            assert client.post("/v1/completions", json=body).text.endswith("data: [DONE]\n\n")


def test_a_client_that_never_shakes_hands_is_cut() -> None:
    context = tls_context(TLS / "cert.pem", TLS / "key.pem")
    limits = HttpLimits(header_s=0.3)

    with fake_server(limits, address=TcpAddress("127.0.0.1", 0, secure=True), tls=context) as server:
        with connect(server.url) as silent:
            assert read_to_end(silent) == b""
        until(lambda: not server.connections.open, "they are still counted")


@pytest.mark.parametrize(
    ("certificate", "key", "says"),
    [
        ("missing.pem", "key.pem", r"missing\.pem cannot be read: No such file"),
        ("cert.pem", "missing.pem", r"missing\.pem cannot be read: No such file"),
        ("cert.pem", "other_key.pem", r"other_key\.pem does not belong to the certificate"),
        ("cert.pem", "locked_key.pem", r"locked_key\.pem has a password"),
        ("key.pem", "key.pem", "cannot be set up from"),
        ("cert.pem", None, "cannot be set up from"),
        (__file__, "key.pem", "cannot be set up from"),
    ],
)
def test_tls_files_that_cannot_be_used_are_one_line(certificate: str, key: str | None, says: str) -> None:
    with pytest.raises(CannotListen, match=says) as caught:
        tls_context(TLS / certificate, TLS / key if key else None)

    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 1


def test_room_for_connections_is_what_the_hard_limit_leaves() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, hard), hard))

        room = allow_many_connections()

        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > room
        assert room > min(hard, 1 << 20) - 2000
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("host", "named", "allowed"),
    [
        ("127.0.0.1", (), {"localhost", "127.0.0.1", "::1"}),
        ("127.0.0.2", (), {"localhost", "127.0.0.1", "::1", "127.0.0.2"}),
        ("::1", (), {"localhost", "127.0.0.1", "::1"}),
        ("localhost", (), {"localhost", "127.0.0.1", "::1"}),
        ("0.0.0.0", (), set()),
        ("192.0.2.1", (), set()),
        ("example.org", (), set()),
        (None, (), set()),
        ("127.0.0.1", ("llm.example",), {"llm.example"}),
        ("127.0.0.1", ("*",), set()),
        ("0.0.0.0", ("llm.example", "llm"), {"llm.example", "llm"}),
    ],
)
def test_hosts_that_a_server_answers_for(host: str | None, named: tuple[str, ...], allowed: set[str]) -> None:
    assert allowed_hosts(host, named) == allowed
