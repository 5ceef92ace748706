"""Signed receipts: whoever has the public key knows who said it; anything else is refused in a line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="cryptography is not installed, the extra phasewise[sign]")
pytest.importorskip(
    "phasewise.cython_kernels._native", reason="the kernels are not built", exc_type=ImportError
)
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from phasewise.serving.engine.fingerprint import Fingerprint
from phasewise.serving.engine.messages import Evidence, Submit
from phasewise.serving.engine.receipts import Receipt, ReceiptError, read_receipt, receipt_of
from phasewise.workflows.errors import WorkflowError
from phasewise.workflows.receipt_keys import known_signer, signing_key

FINGERPRINT = Fingerprint("a" * 64, "b" * 64, "c" * 64, "", "native", "f16", "1/portable/0", "1/0")
PRIVATE = {"PKCS8": form.PrivateFormat.PKCS8, "OpenSSH": form.PrivateFormat.OpenSSH}


def private_bytes(key: Ed25519PrivateKey, kind: str, phrase: bytes | None = None) -> bytes:
    hidden = form.NoEncryption() if phrase is None else form.BestAvailableEncryption(phrase)
    return key.private_bytes(form.Encoding.PEM, PRIVATE[kind], hidden)


def public_bytes(key: Ed25519PrivateKey, kind: str) -> bytes:
    if kind == "PKCS8":
        return key.public_key().public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)
    return key.public_key().public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH)


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.fixture
def receipt() -> Receipt:
    request = Submit("cmpl-1-0-0", (1, 2, 3), 4)
    return receipt_of(request, Evidence((5, 6), ("d" * 64,)), "stop", FINGERPRINT, "tiny")


@pytest.mark.parametrize("kind", PRIVATE)
@pytest.mark.parametrize("known_by", [private_bytes, public_bytes])
def test_what_a_key_signs_its_owner_has_signed(
    tmp_path: Path, receipt: Receipt, kind: str, known_by: Callable[[Ed25519PrivateKey, str], bytes]
) -> None:
    """Through JSON too; and the digest is what it was."""
    key = Ed25519PrivateKey.generate()
    sign = signing_key(written(tmp_path / "key", private_bytes(key, kind)))
    signer = known_signer(written(tmp_path / "known", known_by(key, kind)))
    signed = read_receipt(sign(receipt).to_json())
    assert signed == replace(receipt, signature=signed.signature)
    assert signed.contradictions() == []
    assert signer.refusal(signed) is None
    assert signer.refusal(receipt) == "it is not signed"
    assert "signature" not in receipt.to_json()


def test_a_key_that_ssh_keygen_makes_will_do(tmp_path: Path, receipt: Receipt) -> None:
    try:
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "key")]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("ssh-keygen is not installed")
    assert known_signer(tmp_path / "key.pub").refusal(signing_key(tmp_path / "key")(receipt)) is None


def test_another_s_signature_or_another_text_is_refused(tmp_path: Path, receipt: Receipt) -> None:
    keys = [Ed25519PrivateKey.generate() for _ in range(2)]
    paths = [written(tmp_path / f"key{index}", private_bytes(key, "PKCS8")) for index, key in enumerate(keys)]
    signed, other = (signing_key(path)(receipt) for path in paths)
    signer = known_signer(paths[0])
    assert signer.refusal(signed) is None
    for wrong in (
        other,
        replace(signed, token_ids=(5, 7)),
        replace(signed, model="huge"),
        replace(signed, signature=signed.signature[:-4]),
        replace(signed, signature="no base64, é"),
        replace(signed, signature=other.signature),
    ):
        assert signer.refusal(wrong) == f"its signature is not that of {paths[0]}"


@pytest.mark.parametrize("reader", [signing_key, known_signer])
def test_what_is_no_key_is_refused_in_one_line(tmp_path: Path, reader: Callable[[Path], object]) -> None:
    curve = generate_private_key(SECP256R1()).private_bytes(
        form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption()
    )
    locked = private_bytes(Ed25519PrivateKey.generate(), "PKCS8", b"secret")
    for name, data, said in (
        ("nothing", b"", "key"),
        ("words", b"not a key", "key"),
        ("broken", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", "no private key"),
        ("curve", curve, "no Ed25519 key"),
        ("locked", locked, "passphrase"),
        ("large", b"x" * (1 << 20), "larger than"),
    ):
        path = written(tmp_path / name, data)
        with pytest.raises((ReceiptError, WorkflowError), match=said) as refusal:
            reader(path)
        assert str(path) in str(refusal.value)
        assert "\n" not in str(refusal.value)
    with pytest.raises(WorkflowError, match="No such file"):
        reader(tmp_path / "absent")


@pytest.mark.slow
def test_a_server_signs_and_replay_checks_who_did(tmp_path: Path) -> None:
    """A wrong signature, or none, is exit code 3 and one line."""
    import json

    import httpx

    from tests.support.models.tiny_models import write_tiny_gguf
    from tests.support.servers.served_command import own_places, serving

    model = tmp_path / "tiny.gguf"
    write_tiny_gguf(model)
    environment = own_places(tmp_path / "home")
    keys = [Ed25519PrivateKey.generate() for _ in range(2)]
    private = written(tmp_path / "key", private_bytes(keys[0], "OpenSSH"))
    public = [
        written(tmp_path / f"{index}.pub", public_bytes(key, "OpenSSH")) for index, key in enumerate(keys)
    ]
    asked = {"model": "tiny", "prompt": "abc", "max_tokens": 20, "receipt": True}
    with serving(model, environment, "--port", 0, "--receipts", "--receipt-key", private) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=60).json()
    (choice,) = answer["choices"]
    unsigned = {name: value for name, value in choice["receipt"].items() if name != "signature"}
    files = [tmp_path / "answer.json", tmp_path / "unsigned.json"]
    files[0].write_text(json.dumps(answer))
    files[1].write_text(json.dumps(unsigned))

    def replay(file: Path, *more: object) -> tuple[int, str]:
        command = [sys.executable, "-m", "phasewise", "replay", file, "--model", model, *more]
        done = subprocess.run(
            list(map(str, command)), env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        return done.returncode, done.stdout

    assert replay(files[0], "--signer", public[0])[0] == 0
    assert replay(files[1])[0] == 0
    for file, key, said in ((files[0], public[1], "is not that of"), (files[1], public[0], "is not signed")):
        code, out = replay(file, "--signer", key)
        assert code == 3
        assert said in out.splitlines()[0]
