"""Models by hub name: `org/name`, a directory of safetensors, and `org/name:Q4_K_M`, one of its GGUF files.

The hub is asked once which files of which sizes and digests there are. What it says is checked before a name
of its choosing becomes a path of ours. A model that is whole in the cache is used without asking again.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from phasewise._files import read_file
from phasewise._json import read_json
from phasewise._words import counted
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.fetching.download import (
    DownloadError,
    NotAsPromised,
    Progress,
    RemoteFile,
    fetch_file,
    read_url,
)
from phasewise.serving.loaders.formats.gguf_file import part_paths, stem_of

DEFAULT_ENDPOINT = "https://huggingface.co"
DEFAULT_TAGS = ("Q4_K_M", "Q4_0", "Q8_0", "Q5_K_M", "Q6_K", "BF16", "F16")
"""The GGUF file that a name without a tag means: the first of these that there is."""

MOST_LISTING_BYTES = 16 << 20
MOST_FILES = 10_000
SPARE_BYTES = 1 << 30
"""Bytes of the disk that are left free."""

MOST_WHOLE_BYTES = 1 << 16
"""Most bytes of the file that says that a fetched directory is whole."""
HUB_NAME = re.compile(
    r"(?P<repository>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?::(?P<tag>[A-Za-z0-9][\w.-]{0,63}))?",
    re.ASCII,
)
_FILE_NAME = re.compile(r"[A-Za-z0-9][\w.+-]{0,199}", re.ASCII)
_WANTED = re.compile(r"(?!consolidated)[^/]*\.safetensors|.*\.json|[^/]*\.jinja")
"""Not the same weights in other forms: in folders, or under their author's own names."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")

Report = Callable[[str], None]
DownloadProgress = Callable[[int, int], None]
"""Told bytes here and bytes in all, of all files of a model."""


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
    """The path of a hub name, if it is whole: a GGUF file, or a directory, in our cache or the hub's own."""
    folder = folder_of(ref, root)
    try:
        main = read_json(read_file(folder / ".whole", MOST_WHOLE_BYTES))["main"]
        path = folder if main is None else folder / main
        return path if path.exists() else None
    except (OSError, ValueError, KeyError, TypeError):
        return _in_the_hubs_cache(ref)


def _in_the_hubs_cache(ref: str) -> Path | None:
    """A directory that the hub's own client has fetched, so that it is not stored twice."""
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
    """Fetch what a hub name means and return its path; what is there and whole is kept.

    Says what it will fetch, of which size and licence, before it begins. Raises ModelError.
    """
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
    _check_room(folder, sum(file.n_bytes for file in files))
    total = sum(file.n_bytes for file in files)
    report(f"{ref}: {_described(files)}, {_size(total)}, licence {listing.licence or 'not stated'}")
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
    """A directory keeps its folders; a GGUF file lies by itself."""
    return PurePosixPath(file.name).name if file.name.endswith(".gguf") else file.name


def folder_of(ref: str, root: Path) -> Path:
    """The folder of a hub name."""
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
    """A file of the list; None where size or digest is not given, or the name is not one to keep."""
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
    """The files that a name means: one GGUF, or all that a directory is read from."""
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


def _described(files: list[RemoteFile]) -> str:
    return files[0].name if len(files) == 1 else counted(len(files), "file")


def _check_room(folder: Path, n_bytes: int) -> None:
    place = next(parent for parent in (folder, *folder.parents) if parent.exists())
    parts = sum(part.stat().st_size for part in folder.glob(".*.part")) if folder.is_dir() else 0
    free = shutil.disk_usage(place).free
    if n_bytes - parts + SPARE_BYTES > free:
        raise ModelError(
            f"{n_bytes / 1e9:.2f} GB do not fit {place}, which has {free / 1e9:.2f} GB free;"
            " phasewise models prune makes room, PHASEWISE_CACHE names another place"
        )
