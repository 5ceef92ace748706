"""The files of one model's directory, which a stranger wrote: the door that every loader opens them by.

A link among them may name any file that the user can read, and what a loader reads, clients may see: a chat
template's text is in `/tokenize`'s answer. So what is opened must lie in the directory itself, whatever
its name says. The hub's client keeps its files beside: `models--X/snapshots/REVISION/NAME` is a link to
`models--X/blobs/DIGEST`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.source import (
    MAX_JSON_BYTES,
    SourceFile,
    parse_json_list,
    parse_json_object,
    read_all,
)

_SOURCE_SUFFIXES = (".json", ".safetensors", ".jinja")
"""Files that a model is read from."""
_MODULE_FILES = "*_*/config.json"
"""The settings of sentence-transformers' modules, such as 1_Pooling."""
_README = "README.md"
_MOST_ENTRIES = 100_000


class ModelDirectory:
    """A directory that a user called a model. What is opened through it lies in it, or ModelError says which
    file does not. Names are relative to it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def has(self, name: str) -> bool:
        """True if anything has this name; a link that leads nowhere does not count."""
        return os.path.exists(self.path / name)

    def open(self, name: str) -> SourceFile:
        """A regular file, checked once it is open: what its name means may change."""
        file = SourceFile(self.path / name)
        try:
            self._refuse_outside(name, file.real_path())
        except BaseException:
            file.close()
            raise
        return file

    def text(self, name: str, max_bytes: int = MAX_JSON_BYTES) -> str:
        """A whole UTF-8 file that must not be larger than `max_bytes`."""
        with self.open(name) as file:
            return read_all(file, max_bytes)

    def json(self, name: str) -> dict[str, Any] | None:
        """A JSON object; None where the file is absent."""
        return parse_json_object(self.text(name), str(self.path / name)) if self.has(name) else None

    def json_list(self, name: str, most: int) -> list[Any] | None:
        """A JSON list of at most `most` entries; None where the file is absent."""
        return parse_json_list(self.text(name), str(self.path / name), most) if self.has(name) else None

    def names(self, suffix: str) -> list[str]:
        """Names that end in `suffix`, sorted."""
        return sorted(path.name for path in self.path.glob(f"*{suffix}"))

    def source_files(self) -> list[Path]:
        """Every file that a model is read from, sorted; none of them is a link that leaves the directory."""
        own = [path for path in self.path.iterdir() if path.suffix in _SOURCE_SUFFIXES]
        own += [path for path in (*self.path.glob(_MODULE_FILES), self.path / _README) if path.is_file()]
        files = sorted(own)
        for path in files:
            self._refuse_link_out(path)
        return files

    def refuse_links_out(self) -> None:
        """For a library that is given the whole directory and opens what it likes."""
        for seen, path in enumerate(self._entries()):
            if seen >= _MOST_ENTRIES:
                raise ModelError(f"{self.path} has more than {_MOST_ENTRIES} files: not a model's directory")
            self._refuse_link_out(path)

    def _entries(self) -> Iterator[Path]:
        for folder, folders, files in os.walk(self.path):
            yield from (Path(folder) / name for name in (*folders, *files))

    def _refuse_link_out(self, path: Path) -> None:
        inside = path.relative_to(self.path)
        if not any((self.path / part).is_symlink() for part in (inside, *inside.parents[:-1])):
            return
        try:
            real = real_path(path)
        except FileNotFoundError:  # a link that leads nowhere: nothing can be opened by it
            return
        except OSError as error:
            raise ModelError(f"{path} cannot be followed: {error.strerror}") from error
        self._refuse_outside(str(inside), real)

    def _refuse_outside(self, name: str, real: Path) -> None:
        if not real.is_relative_to(self._real) and real.parent not in self._blobs:
            raise ModelError(
                f"{self.path / name} leads out of the model's directory, to {real}: put a copy of the file"
                " in its place"
            )

    @cached_property
    def _real(self) -> Path:
        try:
            return real_path(self.path)
        except OSError as error:
            raise ModelError(f"{self.path} cannot be opened: {error.strerror}") from error

    @cached_property
    def _blobs(self) -> list[Path]:
        """The folder in which the hub's client keeps the files of this directory's repository, if that has
        made it.
        """
        repositories = (
            folder.parent.parent
            for folder in (self._real, *self._real.parents)
            if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--")
        )
        return [repository / "blobs" for repository in repositories]


def real_path(path: Path) -> Path:
    """A file's or a directory's own path, whatever links lead to it. Opens nothing. OSError."""
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        return Path(os.readlink(f"/proc/self/fd/{descriptor}"))
    finally:
        os.close(descriptor)
