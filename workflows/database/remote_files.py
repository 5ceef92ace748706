"""Files of a remote (a folder, or an address of static files), and trust in its index."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import math
import os
import posixpath
import re
import secrets
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, BinaryIO
from urllib.parse import SplitResult, quote, unquote, urlsplit, urlunsplit

from phasewise._files import open_file, open_regular, write_file
from phasewise._words import counted
from phasewise.kerneldb.location import redacted
from phasewise.kerneldb.remote_index import Bundle, RemoteError
from phasewise.workflows.database.settings import Trust
from phasewise.workflows.report import Report, silent

NAMESPACE = "phasewise"
"""Namespace of our signatures: a signature that was made for another purpose is not accepted."""
SIGNATURE_SUFFIX = ".sig"
MAX_SIGNATURE_BYTES = 64 * 1024
_TIMEOUT_S = 60


def check_index(trust: Trust, index: bytes, signature: bytes | None, name: str) -> None:
    """Raise RemoteError, in one line, where an index does not match the evidence."""
    if trust.digest is not None:
        digest = hashlib.sha256(index).hexdigest()
        if digest != trust.digest.lower():
            raise RemoteError(f"the index of {name} has the digest {digest}, not the one that --digest pins")
    if trust.allowed_signers is not None:
        if not trust.allowed_signers.is_file():
            raise RemoteError(f"there is no file of allowed signers {trust.allowed_signers}")
        if signature is None:
            raise RemoteError(f"the index of {name} is not signed: there is no {SIGNATURE_SUFFIX} file")
        _verify(index, signature, trust.allowed_signers, name)


def _verify(index: bytes, signature: bytes, allowed_signers: Path, name: str) -> None:
    """Verify a signature by the file's signers, whose names ssh-keygen finds by the signature's key."""
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


TIMEOUT_S = 30
LOCK_S = 60.0
"""Most seconds that a push waits for another push."""
_LOOK_AGAIN_S = 0.05
_CHUNK_BYTES = 1 << 20
_LOCK = ".phasewise-lock"


def identity_of(remote: str) -> str:
    """One text for all spellings of the same remote: a folder's real path, or a normalised address."""
    if "://" not in remote:
        return os.path.realpath(os.path.expanduser(remote))
    address = urlsplit(remote)
    path = posixpath.normpath(f"/{quote(unquote(address.path))}").lstrip("/")
    return urlunsplit((address.scheme, _https_host(address), path, address.query, ""))


def _https_host(address: SplitResult) -> str:
    """Normalised host of an address, with the port unless 443. Raises ValueError for an invalid port."""
    host, port = unquote(address.hostname or "").lower().removesuffix("."), address.port
    with suppress(UnicodeError):
        host = host.encode("idna").decode("ascii")
    return host if port in (None, 443) else f"{host}:{port}"


class RemoteFiles:
    """Files of a remote: reads each up to a limit, and writes where the remote is a folder. RemoteError."""

    def __init__(self, remote: str, seconds: float = math.inf) -> None:
        """seconds: time after which reads are given up."""
        self.name = redacted(remote)
        self._seconds, self._deadline_s = seconds, time.monotonic() + seconds
        scheme, mark, rest = remote.partition("://")
        if mark and scheme.lower() != "https":
            raise RemoteError(f"{self.name}: a remote is a folder or an https:// address of static files")
        self._url = f"{scheme.lower()}{mark}{rest.rstrip('/')}" if mark else None
        try:
            self.identity = identity_of(remote)
        except ValueError as error:
            raise RemoteError(f"{self.name} is no address: {error}") from None
        self._folder = Path(remote).expanduser()

    def read(self, path: str, most_bytes: int) -> bytes | None:
        """Read a whole small file; None where there is none."""
        with self._opened(path) as stream:
            if stream is None:
                return None
            content = b"".join(self._chunks(stream, most_bytes + 1))
        if len(content) > most_bytes:
            raise RemoteError(f"{self.name}/{path} is larger than {most_bytes} bytes: it is none of ours")
        return content

    def fetch(self, bundle: Bundle, target: BinaryIO) -> None:
        """Write a bundle to an open file. RemoteError where its size or its digest is another."""
        digest, left = hashlib.sha256(), bundle.bytes
        with self._opened(bundle.path) as stream:
            if stream is None:
                raise RemoteError(f"{self.name}/{bundle.path} is not there, though the index names it")
            for chunk in self._chunks(stream, bundle.bytes + 1):
                left -= len(chunk)
                digest.update(chunk)
                target.write(chunk)
        if left or digest.hexdigest() != bundle.sha256:
            raise RemoteError(
                f"{self.name}/{bundle.path} is not what its name says: it was changed on the way"
            )

    def _chunks(self, stream: Any, most_bytes: int) -> Iterator[bytes]:
        """Yield a stream's content, at most `most_bytes`; a stream that only drips is given up in time."""
        while most_bytes > 0 and (chunk := stream.read1(min(_CHUNK_BYTES, most_bytes))):
            if time.monotonic() > self._deadline_s:
                raise RemoteError(f"{self.name} took more than {round(self._seconds)} s")
            most_bytes -= len(chunk)
            yield chunk

    @contextmanager
    def _opened(self, path: str) -> Iterator[IO[bytes] | None]:
        try:
            if self._url is not None:
                left_s = self._deadline_s - time.monotonic()
                opener = urllib.request.build_opener(_OnlyHttps())
                timeout_s = max(0.1, min(TIMEOUT_S, left_s))
                with opener.open(f"{self._url}/{path}", timeout=timeout_s) as answer:
                    yield answer
            else:
                with open_file(self._folder / path) as stream:
                    yield stream
        except FileNotFoundError:
            yield None
        except urllib.error.HTTPError as error:
            if error.code not in (404, 410):
                raise RemoteError(f"{self.name}/{path} cannot be read: HTTP {error.code}") from None
            yield None
        except (OSError, ValueError) as error:
            if getattr(error, "errno", None) == errno.EINVAL:  # as `open_regular` says it
                raise RemoteError(f"{self.name}/{path} is not a regular file: it is none of ours") from None
            why = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
            raise RemoteError(f"{self.name}/{path} cannot be read: {why!s:.120}") from None

    @contextmanager
    def locked(self, report: Report = silent) -> Iterator[None]:
        """Hold a remote folder's lock, alone among pushes; waits LOCK_S at most. Creates an absent folder."""
        if self._url is not None:
            raise RemoteError(f"{self.name} is only read: push to the folder that it is served from")
        try:
            (self._folder / "bundles").mkdir(parents=True, exist_ok=True)
            descriptor = open_regular(self._folder / _LOCK, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise RemoteError(f"{self.name} cannot be written: {error.strerror}") from None
        try:
            self._lock(descriptor, report)
            yield
        finally:
            os.close(descriptor)

    def _lock(self, descriptor: int, report: Report) -> None:
        deadline_s, is_told = time.monotonic() + LOCK_S, False
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES, errno.EINTR):
                    raise RemoteError(f"{self.name} cannot be locked: {error.strerror}") from None
            if not is_told:
                report(f"another push writes {self.name}: waiting for it, {LOCK_S:.0f} s at most ...")
                is_told = True
            if time.monotonic() > deadline_s:
                raise RemoteError(
                    f"{self.name} is held by another push for {LOCK_S:.0f} s ({_LOCK}): nothing was written; "
                    "push again when that one has ended"
                )
            time.sleep(_LOOK_AGAIN_S)

    def write(self, path: str, content: bytes) -> None:
        """Write the whole file, or nothing of it."""
        try:
            write_file(self._folder / path, content)
        except OSError as error:
            raise RemoteError(f"{self.name}/{path} cannot be written: {error.strerror}") from None

    def has(self, bundle: Bundle) -> bool:
        """True if the bundle is there with the content that its name states."""
        with suppress(RemoteError), open(os.devnull, "wb") as nowhere:
            self.fetch(bundle, nowhere)
            return True
        return False

    def add(self, bundle: Bundle, content: Path) -> None:
        """Copy a bundle to the remote, unless the same bytes are there already."""
        target = self._folder / bundle.path
        if self.has(bundle):
            return
        begun = target.with_name(f".phasewise-{secrets.token_hex(8)}")
        try:
            shutil.copyfile(content, begun)
            begun.replace(target)
        except OSError as error:
            begun.unlink(missing_ok=True)
            what = counted(bundle.rows, "row")
            raise RemoteError(
                f"{self.name}: a bundle of {what} cannot be written: {error.strerror}"
            ) from None


class _OnlyHttps(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: str) -> Any:
        if not newurl.startswith("https://"):
            raise ValueError("it redirects to an address without TLS")
        return super().redirect_request(req, fp, code, msg, headers, newurl)
