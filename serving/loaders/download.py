"""Fetches one file over HTTP: resumed where an earlier attempt ended, kept only if size and digest are right.

A part of a file lies beside its place as `.NAME.part` until it is whole. What a server says is not trusted:
it may send more or less than it promised, other bytes, or redirect for ever.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast
from urllib.parse import urlsplit

from phasewise.serving.errors import ModelError

TIMEOUT_S = 30.0
"""The time for which a server may say nothing."""

PIECE_BYTES = 1 << 20
ATTEMPTS = 5
"""In a row that bring no byte."""

PAUSE_S = 1.0
"""Before the second attempt; doubled for each that follows."""

_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG)

Progress = Callable[[int], None]
"""Told how many bytes of the file are here."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """The promise of a server about a file. `sha256` in hex; else `git_sha1`, of git's header and the
    content.
    """

    url: str
    name: str
    n_bytes: int
    sha256: str | None = None
    git_sha1: str | None = None


class DownloadError(ModelError):
    """A file that cannot be fetched, or is not what was promised."""


class _Lost(Exception):
    """The connection ended early: another attempt may go on."""


@dataclass(slots=True)
class _Digest:
    """A running digest of a file's first bytes."""

    file: RemoteFile
    _hash: Any = field(init=False)

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        if self.file.sha256 is None and self.file.git_sha1 is not None:
            self._hash = hashlib.sha1(b"blob %d\0" % self.file.n_bytes, usedforsecurity=False)
        else:
            self._hash = hashlib.sha256()

    def update(self, piece: bytes) -> None:
        self._hash.update(piece)

    def check(self) -> None:
        wanted = self.file.sha256 or self.file.git_sha1
        if wanted is None:
            return
        if (found := self._hash.hexdigest()) != wanted:
            name = "SHA-256" if self.file.sha256 else "git's SHA-1"
            raise DownloadError(
                f"{self.file.name}: what came has {name} {found}, promised was {wanted}: it is not kept"
            )


class _Redirects(urllib.request.HTTPRedirectHandler):
    """From HTTP(S) to HTTP(S) alone, and never from a secured connection to an open one."""

    max_redirections = 5
    max_repeats = 2

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        before, after = urlsplit(req.full_url).scheme, urlsplit(newurl).scheme
        if after not in ("http", "https") or (before == "https" and after == "http"):
            raise DownloadError(f"{_host(req.full_url)} redirects to {after or 'no'}: not followed")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


_OPENER = urllib.request.build_opener(_Redirects)


def open_url(url: str, headers: Mapping[str, str], secrets: Mapping[str, str]) -> http.client.HTTPResponse:
    """A response. `secrets` are headers that no redirect carries on.

    DownloadError, or an OSError where another attempt may help.
    """
    request = urllib.request.Request(url, headers={"User-Agent": "phasewise", **headers})
    for name, value in secrets.items():
        request.add_unredirected_header(name, value)
    try:
        return cast("http.client.HTTPResponse", _OPENER.open(request, timeout=TIMEOUT_S))
    except urllib.error.HTTPError as error:
        with error:
            raise _refusal(url, error) from None
    except urllib.error.URLError as error:
        raise OSError(f"{_host(url)} is out of reach: {error.reason}") from error


def _refusal(url: str, error: urllib.error.HTTPError) -> Exception:
    if "infinite loop" in str(error.msg):
        return DownloadError(f"{_host(url)} redirects in a loop")
    if 300 <= error.code < 400:
        return DownloadError(f"{_host(url)} redirects to what is not followed (HTTP status {error.code})")
    if error.code in (401, 403, 404):
        return DownloadError(f"{_host(url)} does not have it, or wants a login (HTTP status {error.code})")
    if error.code in (408, 429) or error.code >= 500:
        return OSError(f"{_host(url)} answers with HTTP status {error.code}")
    return DownloadError(f"{_host(url)} answers with HTTP status {error.code}")


def fetch_file(
    file: RemoteFile, target: Path, progress: Progress, secrets: Mapping[str, str] | None = None
) -> None:
    """Put `file` in place of `target`, whole and checked, or raise DownloadError.

    A part that an earlier attempt left is taken up, where the server can send the rest. While one process
    fetches a file, another one is refused it.
    """
    part = target.with_name(f".{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with part.open("a+b") as out:
            _lock(out, file)
            digest = _taken_up(out, file, progress)
            _receive_all(file, out, digest, progress, secrets or {})
            try:
                digest.check()
            except DownloadError:
                part.unlink(missing_ok=True)
                raise
            out.flush()
            os.fsync(out.fileno())
            os.replace(part, target)
    except OSError as error:
        raise DownloadError(
            f"{file.name} cannot be kept in {target.parent}: {error.strerror or error}"
        ) from error


def _lock(out: IO[bytes], file: RemoteFile) -> None:
    try:
        fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise DownloadError(f"{file.name} is being fetched by another process") from None


def _taken_up(out: IO[bytes], file: RemoteFile, progress: Progress) -> _Digest:
    """The digest of the part that is here; a part longer than the file is thrown away."""
    digest = _Digest(file)
    if os.fstat(out.fileno()).st_size > file.n_bytes:
        out.truncate(0)
    out.seek(0)
    while piece := out.read(PIECE_BYTES):
        digest.update(piece)
        progress(out.tell())
    return digest


def _receive_all(
    file: RemoteFile, out: IO[bytes], digest: _Digest, progress: Progress, secrets: Mapping[str, str]
) -> None:
    fruitless = 0
    while (here := out.tell()) < file.n_bytes:
        try:
            _receive(file, out, digest, progress, secrets)
        except (_Lost, http.client.HTTPException, OSError) as error:
            if isinstance(error, OSError) and error.errno in _OF_THE_DISK:
                raise
            fruitless = 0 if out.tell() > here else fruitless + 1
            if fruitless == ATTEMPTS:
                raise DownloadError(
                    f"{file.name}: {error}; {here / 1e6:.1f} of {file.n_bytes / 1e6:.1f} MB are here,"
                    " and the same command goes on from there"
                ) from error
            time.sleep(PAUSE_S * 2**fruitless)


def _receive(
    file: RemoteFile, out: IO[bytes], digest: _Digest, progress: Progress, secrets: Mapping[str, str]
) -> None:
    """The rest of the file from one response, as far as it goes. _Lost if it ends early."""
    here = out.tell()
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={here}-"} if here else {})
    with open_url(file.url, headers, secrets) as response:
        if here and response.status != 206:  # a server that sends everything again
            _start_over(out, digest)
        _check_length(file, response, out.tell())
        for piece in _pieces(response):
            if out.tell() + len(piece) > file.n_bytes:
                raise _not_as_promised(
                    file, out, f"the server sends more than the {file.n_bytes} bytes it listed"
                )
            out.write(piece)
            digest.update(piece)
            progress(out.tell())
    if out.tell() < file.n_bytes:
        raise _Lost("the connection ended early")


def _start_over(out: IO[bytes], digest: _Digest) -> None:
    out.seek(0)
    out.truncate(0)
    digest.begin()


def _check_length(file: RemoteFile, response: http.client.HTTPResponse, here: int) -> None:
    length = response.getheader("Content-Length")
    if length is not None and length.isdigit() and here + int(length) != file.n_bytes:
        raise DownloadError(
            f"{file.name}: the server would send {here + int(length)} bytes, it listed {file.n_bytes}"
        )


def _not_as_promised(file: RemoteFile, out: IO[bytes], what: str) -> DownloadError:
    with contextlib.suppress(OSError):
        out.truncate(0)
    return DownloadError(f"{file.name}: {what}: it is not kept")


def _pieces(response: http.client.HTTPResponse) -> Iterator[bytes]:
    while piece := response.read1(PIECE_BYTES):
        yield piece


def _host(url: str) -> str:
    return urlsplit(url).netloc or "the server"
