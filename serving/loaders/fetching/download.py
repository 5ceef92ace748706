"""Fetches files with the hub's own client: resumed, and kept only if size and digest are right.

A part of a file lies beside its place as `.NAME.part` until it is whole. `hf_hub_download` of the client
(`huggingface_hub`) throws away what an earlier process left of it; its `http_get` goes on from there.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from phasewise._files import open_file
from phasewise._words import counted
from phasewise.serving.errors import ModelError

TIMEOUT_S = 30.0
"""The time for which a server may say nothing while it lists files."""
ATTEMPTS = 3
"""In a row that bring no byte; the client makes some of its own in each."""
PAUSE_S = 1.0
"""Before the second attempt; doubled for each that follows."""

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

    def check(self, path: Path) -> None:
        """NotAsPromised unless `path` is what was promised."""
        if (n_bytes := path.stat().st_size) != self.n_bytes:
            raise NotAsPromised(
                f"{self.name}: {counted(n_bytes, 'byte')} came, the hub listed {self.n_bytes}"
            )
        of_git = hashlib.sha1(b"blob %d\0" % n_bytes, usedforsecurity=False)
        with open_file(path) as content:
            digest = hashlib.file_digest(content, "sha256" if self.sha256 else lambda: of_git).hexdigest()
        if digest != (promised := self.sha256 or self.git_sha1):
            kind = "SHA-256" if self.sha256 else "git's SHA-1"
            raise NotAsPromised(f"{self.name}: what came has {kind} {digest}, promised was {promised}")


class DownloadError(ModelError):
    """A file that cannot be fetched, or is not what was promised."""


class NotAsPromised(DownloadError):
    """A file of another size or digest than the hub listed."""


class Unreachable(DownloadError):
    """A server that does not answer now: another attempt may help."""


def read_url(url: str, most_bytes: int) -> bytes:
    """The answer of the hub to a question, or DownloadError: none comes, or more than `most_bytes`."""
    from huggingface_hub import get_session, hf_raise_for_status

    answer = bytearray()
    with (
        _errors_as_ours(url),
        get_session().stream("GET", url, headers=_headers(), timeout=TIMEOUT_S) as response,
    ):
        hf_raise_for_status(response)
        for piece in response.iter_bytes():
            answer += piece
            if len(answer) > most_bytes:
                raise DownloadError(f"{urlsplit(url).netloc} answers with more than {most_bytes} bytes")
    return bytes(answer)


def fetch_file(file: RemoteFile, target: Path, progress: Progress) -> None:
    """Put `file` in place of `target`, whole and checked, or raise DownloadError.

    A part that an earlier attempt left is taken up, where the server can send the rest. While one process
    fetches a file, another one is refused it.
    """
    part = target.with_name(f".{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with part.open("a+b") as out:  # which waits for no pipe
            _lock(out, file)
            try:
                _receive(file, out, progress)
                out.flush()
                file.check(part)
            except NotAsPromised as error:
                part.unlink(missing_ok=True)
                raise DownloadError(f"{error}: it is not kept") from None
            os.fsync(out.fileno())
            os.replace(part, target)
    except OSError as error:
        raise DownloadError(
            f"{file.name} cannot be kept in {target.parent}: {error.strerror or error}"
        ) from error


def _lock(out: BinaryIO, file: RemoteFile) -> None:
    try:
        fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise DownloadError(f"{file.name} is being fetched by another process") from None


def _receive(file: RemoteFile, out: BinaryIO, progress: Progress) -> None:
    """Add the rest of the file to `out`. A part longer than the file is thrown away."""
    if out.seek(0, os.SEEK_END) > file.n_bytes:
        out.truncate(0)
    fruitless = 0
    while (here := out.seek(0, os.SEEK_END)) < file.n_bytes:
        try:
            _receive_rest(file, out, here, progress)
            return
        except Unreachable as error:
            n_bytes = out.seek(0, os.SEEK_END)
            fruitless = 0 if n_bytes > here else fruitless + 1
            if fruitless == ATTEMPTS:
                raise DownloadError(f"{file.name}: {error}{_so_far(file, n_bytes)}") from error
            time.sleep(PAUSE_S * 2**fruitless)
    progress(here)


def _so_far(file: RemoteFile, here: int) -> str:
    if not here:
        return ""
    mb = f"{here / 1e6:.1f} of {file.n_bytes / 1e6:.1f} MB"
    return f"; {mb} are here, and the same command goes on from there"


def _receive_rest(file: RemoteFile, out: BinaryIO, here: int, progress: Progress) -> None:
    from huggingface_hub.file_download import http_get

    # It would tell of every attempt, with the file's long URL.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    headers = _headers() | {"Accept-Encoding": "identity"}
    with _errors_as_ours(file.url):
        http_get(file.url, out, resume_size=here, headers=headers, tqdm_class=_counter(file, progress))


def _counter(file: RemoteFile, progress: Progress) -> type[Any]:
    """A progress bar, as the hub's client wants one, that shows nothing and tells `progress`."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class Counter(tqdm):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options | {"disable": True})  # type: ignore[no-untyped-call]
            self.n = options.get("initial", 0)

        def update(self, n: float | None = 1) -> bool | None:
            self.n += n or 0
            if self.n > file.n_bytes:
                raise NotAsPromised(
                    f"{file.name}: the hub sends more than the {counted(file.n_bytes, 'byte')} listed"
                )
            progress(int(self.n))
            return None

    return Counter


def _headers() -> dict[str, str]:
    """With the user's token, if there is one: the client sends it to no other host."""
    from huggingface_hub import get_token

    token = get_token()
    return {"User-Agent": "phasewise"} | ({"Authorization": f"Bearer {token}"} if token else {})


@contextmanager
def _errors_as_ours(url: str) -> Iterator[None]:
    """Errors of the hub's client become a DownloadError; those of the disk stay."""
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, OfflineModeIsEnabled

    host = urlsplit(url).netloc or "the hub"
    try:
        yield
    except DownloadError:
        raise
    except OfflineModeIsEnabled as error:
        raise DownloadError("HF_HUB_OFFLINE is set, so the hub is not asked") from error
    except GatedRepoError as error:
        raise DownloadError(
            f"{host} wants its terms accepted on the model's page, and then HF_TOKEN of that account"
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (408, 429) or status >= 500:
            raise Unreachable(f"{host} answers with HTTP status {status}") from error
        says = "does not have it, or wants a login" if status in (401, 403, 404) else "refuses it"
        raise DownloadError(f"{host} {says} (HTTP status {status})") from error
    except Exception as error:  # of the client's transport: httpx or httpx2, as its version is
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = re.sub(r"^\[Errno -?\d+\] ", "", " ".join(str(error).split()))
        raise Unreachable(f"{host} is out of reach: {reason}") from error
