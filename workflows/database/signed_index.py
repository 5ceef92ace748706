"""Trust in a remote's index: a digest that the caller pins, or a signature that `ssh-keygen` verifies."""

from __future__ import annotations

import hashlib
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from phasewise.kerneldb.remote_index import RemoteError

NAMESPACE = "phasewise"
"""The namespace of signatures: one that was made for something else is not one of ours."""
SIGNATURE_SUFFIX = ".sig"
MAX_SIGNATURE_BYTES = 64 * 1024
_TIMEOUT_S = 60


@dataclass(frozen=True)
class Trust:
    """The reason to believe an index: one of the two, or both."""

    digest: str | None = None
    """SHA-256 of the index, in hex."""
    allowed_signers: Path | None = None
    """A file as `ssh-keygen` reads it: names and public keys."""

    @property
    def is_given(self) -> bool:
        """There is something to check an index by."""
        return self.digest is not None or self.allowed_signers is not None

    def check(self, index: bytes, signature: bytes | None, name: str) -> None:
        """RemoteError, in one line, where the index is not believed."""
        if self.digest is not None:
            digest = hashlib.sha256(index).hexdigest()
            if digest != self.digest.lower():
                raise RemoteError(
                    f"the index of {name} has the digest {digest}, not the one that --digest pins"
                )
        if self.allowed_signers is not None:
            if not self.allowed_signers.is_file():
                raise RemoteError(f"there is no file of allowed signers {self.allowed_signers}")
            if signature is None:
                raise RemoteError(f"the index of {name} is not signed: there is no {SIGNATURE_SUFFIX} file")
            _verify(index, signature, self.allowed_signers, name)


def _verify(index: bytes, signature: bytes, allowed_signers: Path, name: str) -> None:
    """By any signer of the file, whose names the signature's key is looked up in."""
    with TemporaryDirectory(prefix="phasewise-") as folder:
        file = Path(folder) / "index.sig"
        file.write_bytes(signature)
        looked_up = _ssh_keygen("find-principals", "-s", str(file), "-f", str(allowed_signers))
        for line in looked_up.stdout.decode("utf-8", "replace").splitlines():
            signer = line.split(",")[0].strip()
            options = ("-s", str(file), "-f", str(allowed_signers), "-I", signer, "-n", NAMESPACE)
            if _ssh_keygen("verify", *options, content=index).returncode == 0:
                return
    raise RemoteError(f"the index of {name} is signed by nobody whom {allowed_signers} allows")


def sign(index: bytes, key: Path) -> bytes:
    """The signature of an index by a private key, or the public half of one that an agent holds."""
    with TemporaryDirectory(prefix="phasewise-") as folder:
        file = Path(folder) / "index"
        file.write_bytes(index)
        done = _ssh_keygen("sign", "-f", str(key.expanduser()), "-n", NAMESPACE, str(file))
        signature = file.with_name(file.name + SIGNATURE_SUFFIX)
        if done.returncode or not signature.is_file():
            said = re.sub(r"\s+", " ", done.stderr.decode("utf-8", "replace")).strip()
            raise RemoteError(f"the index cannot be signed with {key}: {said:.160}")
        return signature.read_bytes()


def _ssh_keygen(verb: str, *arguments: str, content: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = ["ssh-keygen", "-Y", verb, *arguments]
    try:
        return subprocess.run(command, input=content, capture_output=True, check=False, timeout=_TIMEOUT_S)
    except FileNotFoundError:
        raise RemoteError("signatures need ssh-keygen, of OpenSSH 8.2 or newer: install it") from None
    except subprocess.TimeoutExpired:
        raise RemoteError(f"ssh-keygen took more than {_TIMEOUT_S} s") from None
