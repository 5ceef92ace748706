"""Heads of clusters that are none: one line in seconds; stdout beside a connection to Ray is ours alone."""

from __future__ import annotations

import contextlib
import io
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from phasewise.cluster.errors import ClusterError
from phasewise.cluster.real import ray_connection
from phasewise.cluster.real.ray_connection import OwnStdout
from tests.cli.command import run

TLS = Path(__file__).resolve().parents[2] / "data" / "tls"
SETTINGS = bytes([0, 0, 6, 4, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 100])
Speak = Callable[[socket.socket], None]


@contextlib.contextmanager
def head(speak: Speak) -> Iterator[str]:
    """The address of a head that treats each connection so."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    with connection, contextlib.suppress(OSError):
                        speak(connection)

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def silent(connection: socket.socket) -> None:
    while connection.recv(4096):
        pass


def sends(*parts: bytes) -> Speak:
    def speak(connection: socket.socket) -> None:
        for part in parts:
            connection.sendall(part)
        silent(connection)

    return speak


def encrypted(speak: Speak) -> Speak:
    """As Ray with RAY_USE_TLS: who has no certificate of its authority is not heard."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS / "cert.pem", TLS / "key.pem")
    context.load_verify_locations(TLS / "cert.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols(["h2"])

    def answer(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as channel:
            speak(channel)

    return answer


GREETS = sends(SETTINGS)
OTHERS: dict[str, tuple[Speak, str]] = {
    "one that says nothing": (silent, "says nothing"),
    "one that closes at once": (lambda connection: None, "(closes the connection|does not answer)"),
    "one that stops in the middle": (sends(SETTINGS[:5]), "says nothing"),
    "a web server": (sends(b"HTTP/1.1 400 Bad Request\r\n\r\n"), "does not answer as Ray does"),
    "zeros without end": (sends(bytes(1 << 16)), "does not answer as Ray does"),
    "an alert of TLS": (sends(b"\x15\x03\x01\x00\x02\x02\x46"), "speaks TLS"),
    "a whole TLS": (encrypted(GREETS), "(speaks TLS|closes the connection|does not answer)"),
}


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_USE_TLS", "RAY_AUTH_MODE", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ray_connection, "GREETING_S", 60.0)  # a busy machine's head greets late


def with_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USE_TLS", "1")
    for name, file in (("SERVER_CERT", "cert.pem"), ("SERVER_KEY", "key.pem"), ("CA_CERT", "cert.pem")):
        monkeypatch.setenv(f"RAY_TLS_{name}", str(TLS / file))


@pytest.mark.parametrize("parts", [(SETTINGS,), (SETTINGS[:4], SETTINGS[4:])])
def test_a_head_that_greets_is_left_to_ray(parts: tuple[bytes, ...]) -> None:
    with head(sends(*parts)) as address:
        ray_connection._check_listens(address)


def test_a_head_with_tls_greets_who_has_its_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    with_certificates(monkeypatch)
    with head(encrypted(GREETS)) as address:
        ray_connection._check_listens(address)


@pytest.mark.parametrize("name", OTHERS)
def test_any_other_is_refused_in_one_line_that_says_what_to_compare(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    speak, problem = OTHERS[name]
    if problem == "says nothing":
        monkeypatch.setattr(ray_connection, "GREETING_S", 0.1)
    with head(speak) as address, pytest.raises(ClusterError, match=problem) as refusal:
        ray_connection._check_listens(address)

    assert "set that here too" in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("speak", [silent, GREETS, sends(b"\x15\x03\x01\x00\x02\x02\x46")])
def test_a_head_without_tls_is_refused_where_tls_is_set(
    monkeypatch: pytest.MonkeyPatch, speak: Speak
) -> None:
    with_certificates(monkeypatch)
    if speak is silent:
        monkeypatch.setattr(ray_connection, "GREETING_S", 0.1)
    with head(speak) as address, pytest.raises(ClusterError, match="RAY_USE_TLS is set here") as refusal:
        ray_connection._check_listens(address)

    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("change", [("RAY_TLS_CA_CERT", "/nothing/here"), ("RAY_TLS_SERVER_KEY", "")])
def test_certificates_that_are_not_there_are_named(
    monkeypatch: pytest.MonkeyPatch, change: tuple[str, str]
) -> None:
    with_certificates(monkeypatch)
    monkeypatch.setenv(*change)
    with head(silent) as address, pytest.raises(ClusterError, match="do not name certificates") as refusal:
        ray_connection._check_listens(address)

    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("command", [("status",), ("status", "--json"), ("drain", "prompt-0")])
@pytest.mark.parametrize("address_is", ["told", "auto"])
def test_every_command_ends_with_the_line_and_ray_is_not_started(
    monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], address_is: str
) -> None:
    """An address that is given, and one that Ray finds by itself."""

    def no_start(**_: object) -> None:
        raise AssertionError("Ray would try for minutes")

    with head(OTHERS["an alert of TLS"][0]) as address:
        services = SimpleNamespace(canonicalize_bootstrap_address=lambda _: address)
        fake = SimpleNamespace(is_initialized=lambda: False, init=no_start)
        monkeypatch.setitem(sys.modules, "ray", fake)
        monkeypatch.setitem(sys.modules, "ray._private.services", services)
        chosen = ("--cluster", address) if address_is == "told" else ()
        done = run("cluster", *command, *chosen)

    assert (done.exit_code, done.stdout) == (1, "")
    assert "speaks TLS" in done.refusal
    assert len(done.refusal.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "is_data"), [("MainThread", True), ("worker", True), ("ray_listen_error_messages", False)]
)
def test_lines_of_rays_threads_are_no_data(
    name: str, is_data: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    data = io.StringIO()
    with contextlib.redirect_stdout(OwnStdout(data)):
        thread = threading.Thread(target=lambda: print("a node is dead"), name=name)
        thread.start()
        thread.join()
        sys.stdout.flush()

    assert (data.getvalue() == "a node is dead\n") == is_data
    assert (capsys.readouterr().err == "a node is dead\n") != is_data
