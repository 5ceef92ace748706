"""Models by hub name: `org/name`, a directory of safetensors, and `org/name:Q4_K_M`, one of its GGUF files.

The hub is asked once for names, sizes and digests of the files, and its answer is checked before a name in it
becomes a path here. A model that is whole in the cache is used without asking again.

A part of a file lies beside its place as `.NAME.part` until it is whole, and is kept only if size and digest
are right. `hf_hub_download` of the client (`huggingface_hub`) throws away a part that an earlier process
left; its `http_get` goes on from there."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO
from urllib.parse import quote, urlsplit

from phasewise._files import open_file, read_file
from phasewise._json import read_json
from phasewise._words import counted
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.formats.gguf_file import part_paths, stem_of

TIMEOUT_S = 30.0
"""Seconds for which a server may be silent while it lists files."""
Progress = Callable[[int], None]
"""Is called with the bytes of the file that are here."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A server's promise about a file. `git_sha1`: of git's header and the content, where `sha256` is
    None."""

    url: str
    name: str
    n_bytes: int
    sha256: str | None = None
    git_sha1: str | None = None

    def check(self, path: Path) -> None:
        """Raise NotAsPromised unless the file at `path` has the promised size and digest."""
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


def read_url(url: str, most_bytes: int) -> bytes:
    """Read the hub's answer to a request. Raises DownloadError if none comes, or more than `most_bytes`."""
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
    fetches a file, another one is refused it."""
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
    from huggingface_hub.file_download import http_get

    # It would tell of every attempt, with the file's long URL.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    if out.seek(0, os.SEEK_END) > file.n_bytes:
        out.truncate(0)
    if (here := out.seek(0, os.SEEK_END)) == file.n_bytes:
        progress(here)
        return
    headers = _headers() | {"Accept-Encoding": "identity"}
    try:
        with _errors_as_ours(file.url):
            http_get(file.url, out, resume_size=here, headers=headers, tqdm_class=_counter(file, progress))
    except NotAsPromised:
        raise
    except DownloadError as error:
        raise DownloadError(f"{file.name}: {error}{_so_far(file, out.seek(0, os.SEEK_END))}") from error


def _so_far(file: RemoteFile, here: int) -> str:
    if not here:
        return ""
    mb = f"{here / 1e6:.1f} of {file.n_bytes / 1e6:.1f} MB"
    return f"; {mb} are here, and the same command goes on from there"


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
    """Headers with the user's token, if there is one: the client sends it to no other host."""
    from huggingface_hub import get_token

    token = get_token()
    return {"User-Agent": "phasewise"} | ({"Authorization": f"Bearer {token}"} if token else {})


@contextmanager
def _errors_as_ours(url: str) -> Iterator[None]:
    """Turn errors of the hub's client into DownloadError; errors of the disk stay."""
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
            raise DownloadError(f"{host} answers with HTTP status {status}") from error
        says = "does not have it, or wants a login" if status in (401, 403, 404) else "refuses it"
        raise DownloadError(f"{host} {says} (HTTP status {status})") from error
    except Exception as error:  # of the client's transport: httpx or httpx2, as its version is
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = re.sub(r"^\[Errno -?\d+\] ", "", " ".join(str(error).split()))
        raise DownloadError(f"{host} is out of reach: {reason}") from error


DEFAULT_ENDPOINT = "https://huggingface.co"
DEFAULT_TAGS = ("Q4_K_M", "Q4_0", "Q8_0", "Q5_K_M", "Q6_K", "BF16", "F16")
"""Tags of the GGUF file for a name without a tag, in order of preference."""

MOST_LISTING_BYTES = 16 << 20
MOST_FILES = 10_000
SPARE_BYTES = 1 << 30
"""Bytes of the disk that are left free."""

MOST_WHOLE_BYTES = 1 << 16
"""Most bytes of the `.whole` file, which marks a fetched directory as whole."""
HUB_NAME = re.compile(
    r"(?P<repository>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?::(?P<tag>[A-Za-z0-9][\w.-]{0,63}))?",
    re.ASCII,
)
_FILE_NAME = re.compile(r"[A-Za-z0-9][\w.+-]{0,199}", re.ASCII)
_WANTED = re.compile(r"([^/]*_Dense/|(?!consolidated))[^/]*\.safetensors|.*\.json|[^/]*\.jinja")
"""Files to fetch, without the same weights in other forms: in folders, or under their author's own names."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")

Report = Callable[[str], None]
DownloadProgress = Callable[[int, int], None]
"""Is called with bytes here and bytes in all, of all files of a model."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a repository at one commit: paths in it, and what is promised of each file."""

    commit: str
    files: dict[str, RemoteFile]
    licence: str | None


def is_hub_name(ref: str) -> bool:
    """True if `ref` is written like a name of the hub."""
    return HUB_NAME.fullmatch(ref) is not None and not ref.endswith(".gguf")


def here(ref: str, root: Path) -> Path | None:
    """The path of a hub name's whole file or directory, in our cache or the hub's own; None where absent."""
    folder = folder_of(ref, root)
    try:
        main = read_json(read_file(folder / ".whole", MOST_WHOLE_BYTES))["main"]
        path = folder if main is None else folder / main
        return path if path.exists() else None
    except (OSError, ValueError, KeyError, TypeError):
        return _in_the_hubs_cache(ref)


def _in_the_hubs_cache(ref: str) -> Path | None:
    """The directory that the hub's own client has fetched, so that it is not stored twice."""
    from huggingface_hub import snapshot_download

    if ":" in ref:
        return None
    try:
        folder = Path(snapshot_download(ref, local_files_only=True))
    except Exception:  # it is not there, or not as this version keeps it
        return None
    weights = list(folder.glob("*.safetensors"))
    return folder if weights and (folder / "config.json").is_file() else None


def pull(ref: str, root: Path, report: Report, progress: DownloadProgress) -> Path:
    """Fetch the files of a hub name and return their path; files that are there and whole are kept. Reports
    what it will fetch, its size and licence, before it begins. Raises ModelError."""
    match = HUB_NAME.fullmatch(ref)
    if match is None:
        raise ModelError(f"{ref!r:.200} is not a hub name such as org/name or org/name-GGUF:Q4_K_M")
    repository, tag = match["repository"], match["tag"]
    try:
        listing = _list(repository)
        files = _chosen(tag, listing)
    except (DownloadError, OSError) as error:
        raise ModelError(f"{repository} cannot be fetched: {error}") from error
    folder = folder_of(ref, root)
    total = sum(file.n_bytes for file in files)
    _check_room(folder, total)
    said = files[0].name if len(files) == 1 else counted(len(files), "file")
    report(f"{ref}: {said}, {_size(total)}, licence {listing.licence or 'not stated'}")
    done = 0
    for file in files:
        before = done

        def count(n_bytes: int, before: int = before) -> None:
            progress(before + n_bytes, total)

        _fetch_unless_whole(file, folder / _kept_as(file), count)
        done += file.n_bytes
    main = _kept_as(files[0]) if files[0].name.endswith(".gguf") else None
    _remember(folder, {"main": main, "commit": listing.commit, "name": ref})
    return folder if main is None else folder / main


def _kept_as(file: RemoteFile) -> str:
    """The path of a file in a model's folder: a GGUF file leaves the repository's folders out."""
    return PurePosixPath(file.name).name if file.name.endswith(".gguf") else file.name


def folder_of(ref: str, root: Path) -> Path:
    return root / "models" / "hub" / ref.replace("/", "--").replace(":", "@")


def _remember(folder: Path, fields: dict[str, Any]) -> None:
    temporary = folder / ".whole.new"
    temporary.write_text(json.dumps(fields), encoding="utf-8")
    os.replace(temporary, folder / ".whole")


def _fetch_unless_whole(file: RemoteFile, target: Path, progress: Progress) -> None:
    try:
        file.check(target)
        progress(file.n_bytes)
    except (FileNotFoundError, NotAsPromised):
        fetch_file(file, target, progress)


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", DEFAULT_ENDPOINT).rstrip("/")


def _list(repository: str) -> Listing:
    text = read_url(f"{_endpoint()}/api/models/{repository}?blobs=true", MOST_LISTING_BYTES)
    try:
        fields = read_json(text)
        commit, siblings = fields["sha"], fields["siblings"]
        if not _COMMIT.fullmatch(commit) or not isinstance(siblings, list) or len(siblings) > MOST_FILES:
            raise ValueError("no commit, or too many files")
        files = {
            path: file
            for sibling in siblings
            if (file := _promised(repository, commit, sibling))
            for path in [sibling["rfilename"]]
        }
        return Listing(commit, files, _licence(fields))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DownloadError("the hub's list of its files is not as the hub's interface says") from error


def _licence(fields: dict[str, Any]) -> str | None:
    card = fields.get("cardData")
    licence = card.get("license") if isinstance(card, dict) else None
    return licence[:60] if isinstance(licence, str) else None


def _promised(repository: str, commit: str, fields: dict[str, Any]) -> RemoteFile | None:
    """Read one file of a repository's list; None where its size or digest is missing, or its name is not one
    to keep."""
    path, size, lfs = fields["rfilename"], fields.get("size"), fields.get("lfs") or {}
    sha256, blob = lfs.get("sha256"), fields.get("blobId")
    parts = path.split("/")
    if not all(_FILE_NAME.fullmatch(part) for part in parts) or len(path) > 400:
        return None
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        return None
    if sha256 is not None and not _SHA256.fullmatch(sha256):
        return None
    if sha256 is None and (blob is None or not _COMMIT.fullmatch(blob)):
        return None
    url = f"{_endpoint()}/{repository}/resolve/{commit}/{quote(path)}"
    return RemoteFile(url, path, size, sha256, None if sha256 else blob)


def _chosen(tag: str | None, listing: Listing) -> list[RemoteFile]:
    """The files to fetch for a name: one GGUF model, or all that a directory is read from."""
    gguf = {
        path: file
        for path, file in listing.files.items()
        if path.endswith(".gguf") and "mmproj" not in path.lower()
    }
    plain = [file for path, file in sorted(listing.files.items()) if _WANTED.fullmatch(path)]
    weights = [file for file in plain if file.name.endswith(".safetensors")]
    if tag is None and weights:
        return plain
    if not gguf:
        raise DownloadError(f"it holds no {'GGUF file' if tag else 'safetensors or GGUF file'}")
    tags = (tag,) if tag else DEFAULT_TAGS
    for wanted_tag in tags:
        tagged = [file for path, file in sorted(gguf.items()) if _has_tag(path, wanted_tag)]
        if tagged:
            return _whole_model(tagged)
    if tag is None and len(gguf) == 1:
        return list(gguf.values())
    first = [file for _, file in sorted(gguf.items())][:12]
    some = ", ".join(f"{file.name} ({_size(file.n_bytes)})" for file in first)
    raise DownloadError(f"it has no GGUF file {tag or 'of a usual type'}; there are {some}")


def _has_tag(path: str, tag: str) -> bool:
    """`...-Q4_K_M.gguf`, or a part, `...-Q4_K_M-00001-of-00002.gguf`; letter case does not matter."""
    stem = stem_of(PurePosixPath(path).name)
    return re.search(rf"(^|[-._]){re.escape(tag)}$", stem, re.IGNORECASE) is not None


def _whole_model(files: list[RemoteFile]) -> list[RemoteFile]:
    """The first of these files, with the other parts where it is one of several."""
    first = PurePosixPath(files[0].name)
    by_name = {file.name: file for file in files}
    names = [str(path) for path in part_paths(Path(first))]
    missing = [name for name in names if name not in by_name]
    if missing:
        raise DownloadError(f"{first} is one of {counted(len(names), 'part')}, and {missing[0]} is not there")
    return [by_name[name] for name in names]


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.2f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.1f} MB"


def _check_room(folder: Path, n_bytes: int) -> None:
    place = next(parent for parent in (folder, *folder.parents) if parent.exists())
    parts = sum(part.stat().st_size for part in folder.glob(".*.part")) if folder.is_dir() else 0
    free = shutil.disk_usage(place).free
    if n_bytes - parts + SPARE_BYTES > free:
        raise ModelError(
            f"{n_bytes / 1e9:.2f} GB do not fit {place}, which has {free / 1e9:.2f} GB free;"
            " phasewise models prune makes room, PHASEWISE_CACHE names another place"
        )
