"""SIGHUP: keys and certificate are those that were read last, and were whole."""

from __future__ import annotations

import ssl
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from random import Random

from phasewise.serving.http.routes.middleware import ApiKeys, on_hangup
from phasewise.serving.http.transport.listening import tls_context
from tests.support.servers.rude_clients import until

TLS = Path(__file__).parents[2] / "data" / "tls"


def test_keys_that_were_read_first_do_not_replace_those_that_were_read_later() -> None:
    """The first read has the old file and takes its time; a key is withdrawn meanwhile."""
    keys, file = ApiKeys(("start",)), [("old", "withdrawn")]
    has_read, goes_on, n_reads = threading.Event(), threading.Event(), 0

    def read() -> tuple[str, ...]:
        nonlocal n_reads
        n_reads, own = n_reads + 1, file[-1]
        if n_reads == 1:
            has_read.set()
            goes_on.wait(0.2)  # the second would be through by then, where it does not wait
        return own

    hang_up = on_hangup((), keys, read)
    assert hang_up is not None
    hang_up()
    assert has_read.wait(60)
    file.append(("old",))
    hang_up()

    until(lambda: n_reads == 2, "the file is not read again")
    until(lambda: not any(each.name == "phasewise-keys" for each in threading.enumerate()), "a read goes on")
    assert keys.digest_of("old") is not None
    assert keys.digest_of("withdrawn") is None


def handshake(server: ssl.SSLContext) -> bytes:
    """The certificate that a client is shown."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)]
    for _ in range(4):
        for end in ends:
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    shown = ends[0].getpeercert(binary_form=True)
    assert shown is not None
    return shown


def pairs(folder: Path) -> list[tuple[bytes, bytes]]:
    """Two certificates with their keys."""
    new = folder / "new.pem", folder / "new_key.pem"
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    subprocess.run(
        ["openssl", "req", "-x509", "-nodes", *curve, "-subj", "/CN=x", "-keyout", new[1], "-out", new[0]],
        check=True, capture_output=True,
    )  # fmt: skip
    own = TLS / "cert.pem", TLS / "key.pem"
    return [(certificate.read_bytes(), key.read_bytes()) for certificate, key in (own, new)]


def test_a_certificate_is_read_again_and_a_bad_pair_keeps_the_old_one(tmp_path: Path) -> None:
    """Drawn states of the two files: shown is the last whole pair. Each reading is told in a line."""
    good = pairs(tmp_path)
    places = certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"

    def put(pair: tuple[bytes, bytes]) -> None:
        for place, content in zip(places, pair, strict=True):
            place.write_bytes(content)

    put(good[0])
    context = tls_context(certificate, key)
    shown = [ssl.PEM_cert_to_DER_cert(pair[0].decode()) for pair in good]
    state, rng = 0, Random(5)
    bad = [(good[0][0], good[1][1]), (good[1][0], b""), (b"no certificate", good[0][1])]
    bad.append((good[0][0], (TLS / "locked_key.pem").read_bytes()))
    for _ in range(20):
        said: list[str] = []
        choice = rng.randrange(6)
        if choice < 2:
            put(good[choice])
            state = choice
        else:
            put(bad[choice - 2])
        if rng.random() < 0.2:
            key.unlink()
            state = state if choice >= 2 else shown.index(handshake(context))
        context.read_again(said.append)
        assert len(said) == 1
        assert handshake(context) == shown[state]
        assert handshake(context) == shown[state]


def test_a_hangup_reads_the_certificate_where_there_is_nothing_else_to_read() -> None:
    was_read = threading.Event()
    hang_up = on_hangup((), ApiKeys(()), None, was_read.set)
    assert hang_up is not None
    hang_up()
    assert was_read.wait(60)
