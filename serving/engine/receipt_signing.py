"""Signatures of receipts: Ed25519, by a key in a PEM or an OpenSSH file. Needs the extra `phasewise[sign]`.

What is signed is a receipt's digest, which covers all of it, behind words that no other protocol signs.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import replace

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from phasewise.serving.engine.receipts import Receipt, ReceiptError, SignReceipt

_PURPOSE = "phasewise receipt signature 1\n"


def signer_of(data: bytes, name: str) -> SignReceipt:
    """Signs receipts by the private key in `data`, a file's content. ReceiptError where there is none."""
    key = _private(data, name)

    def sign(receipt: Receipt) -> Receipt:
        signature = base64.b64encode(key.sign(_signed(receipt)))
        return replace(receipt, signature=signature.decode("ascii"))

    return sign


class Signer:
    """The owner of a key, as a check knows it: by the public key in a file's content, or the private one."""

    def __init__(self, data: bytes, name: str) -> None:
        """ReceiptError where there is no such key. name: the file's."""
        self._name = name
        self._key = _public(data, name)

    def refusal(self, receipt: Receipt) -> str | None:
        """Why the receipt is not this signer's; None: it is."""
        if not receipt.signature:
            return "it is not signed"
        try:
            self._key.verify(base64.b64decode(receipt.signature, validate=True), _signed(receipt))
        except (InvalidSignature, binascii.Error, ValueError):
            return f"its signature is not that of {self._name}"
        return None


def _signed(receipt: Receipt) -> bytes:
    return f"{_PURPOSE}{receipt.own_digest()}".encode()


def _private(data: bytes, name: str) -> Ed25519PrivateKey:
    is_openssh = b"BEGIN OPENSSH PRIVATE KEY" in data
    load = serialization.load_ssh_private_key if is_openssh else serialization.load_pem_private_key
    try:
        key = load(data, password=None)
    except TypeError:
        raise ReceiptError(f"{name} is protected by a passphrase: give a key without one") from None
    except (ValueError, UnsupportedAlgorithm):
        raise ReceiptError(f"{name} is no private key, in PEM or as OpenSSH writes it") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ReceiptError(f"{name} is no Ed25519 key: make one with ssh-keygen -t ed25519")
    return key


def _public(data: bytes, name: str) -> Ed25519PublicKey:
    if b"PRIVATE KEY" in data:
        return _private(data, name).public_key()
    is_pem = data.lstrip().startswith(b"-----")
    load = serialization.load_pem_public_key if is_pem else serialization.load_ssh_public_key
    try:
        key = load(data)
    except (ValueError, UnsupportedAlgorithm):
        raise ReceiptError(f"{name} is no public key, in PEM or as OpenSSH writes it") from None
    if not isinstance(key, Ed25519PublicKey):
        raise ReceiptError(f"{name} is no Ed25519 key")
    return key
