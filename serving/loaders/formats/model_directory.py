"""The files of one model's directory, which a stranger wrote: every loader opens them through this module.

A link among them may name any file that the user can read, and clients may see what a loader reads: a chat
template's text is in `/tokenize`'s answer. So a file must lie in the directory itself, or among the hub
client's blobs: `models--X/snapshots/REVISION/NAME` is a link to `models--X/blobs/DIGEST`."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from phasewise._safetensors import LENGTH_BYTES, TensorEntry, entries_of, header_bytes
from phasewise.cython_kernels.packing import Array, from_bf16
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.source import (
    BF16,
    F16,
    F32,
    MAX_JSON_BYTES,
    SourceFile,
    SourceTensor,
    WeightForm,
    parse_json_list,
    parse_json_object,
    read_all,
)

_SOURCE_SUFFIXES = (".json", ".safetensors", ".jinja")
"""Suffixes of files that a model is read from."""
_MODULE_FILES = "*_*/config.json", "*_*/model.safetensors"
"""Patterns of the files of sentence-transformers' modules, such as 1_Pooling and 2_Dense."""
_README = "README.md"
_MOST_ENTRIES = 100_000

Entry = TypeVar("Entry")


class ModelDirectory:
    """A model's directory. Raises ModelError for files that lie outside. Names are relative to it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def has(self, name: str) -> bool:
        """True if anything has this name; a link that leads nowhere does not count."""
        return os.path.exists(self.path / name)

    def open(self, name: str) -> SourceFile:
        """Open a regular file; its place is checked once it is open, since a name's meaning may change."""
        file = SourceFile(self.path / name)
        try:
            self._refuse_outside(name, file.real_path())
        except BaseException:
            file.close()
            raise
        return file

    def text(self, name: str, max_bytes: int = MAX_JSON_BYTES) -> str:
        """Read a whole UTF-8 file that must not be larger than `max_bytes`."""
        with self.open(name) as file:
            return read_all(file, max_bytes)

    def json(self, name: str) -> dict[str, Any] | None:
        """Read a JSON object; None where the file is absent."""
        return parse_json_object(self.text(name), str(self.path / name)) if self.has(name) else None

    def json_list(self, name: str, most: int) -> list[Any] | None:
        """Read a JSON list of at most `most` entries; None where the file is absent."""
        return parse_json_list(self.text(name), str(self.path / name), most) if self.has(name) else None

    def names(self, suffix: str) -> list[str]:
        """Names of files that end in `suffix`, sorted."""
        return sorted(path.name for path in self.path.glob(f"*{suffix}"))

    def source_files(self) -> list[Path]:
        """Every file that a model is read from, sorted. Raises ModelError for a link out of the directory."""
        own = [path for path in self.path.iterdir() if path.suffix in _SOURCE_SUFFIXES]
        of_modules = [path for pattern in _MODULE_FILES for path in self.path.glob(pattern)]
        own += [path for path in (*of_modules, self.path / _README) if path.is_file()]
        files = sorted(own)
        for path in files:
            self._refuse_link_out(path)
        return files

    def refuse_links_out(self) -> None:
        """Raise ModelError for any link out of the directory, before a library opens what it likes in it."""
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
        """The folder in which the hub's client keeps this directory's files, if it made the directory."""
        repositories = (
            folder.parent.parent
            for folder in (self._real, *self._real.parents)
            if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--")
        )
        return [repository / "blobs" for repository in repositories]


def real_path(path: Path) -> Path:
    """Follow all links to a file's or a directory's own path, without opening it. Raises OSError."""
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        return Path(os.readlink(f"/proc/self/fd/{descriptor}"))
    finally:
        os.close(descriptor)


Shards = list[tuple[SourceFile, dict[str, TensorEntry]]]
"""Open weight files, each with its table of tensors."""
READABLE: dict[str, WeightForm] = {"F32": F32, "F16": F16, "BF16": BF16}


def read_entries(file: SourceFile) -> dict[str, TensorEntry]:
    """Read the table of a safetensors header, whose entries lie in the file and overlap no other."""
    try:
        length = header_bytes(file.read(0, min(file.size, LENGTH_BYTES)), file.size)
        table = parse_json_object(file.read(LENGTH_BYTES, length), f"the header of {file.path}")
        return entries_of(table, LENGTH_BYTES + length, file.size)
    except ValueError as error:
        raise ModelError(f"{file.path} {error}") from None


def tensor_of(file: SourceFile, name: str, entry: TensorEntry) -> SourceTensor:
    """A view of the tensor as rows of float32; of a stack of matrices, the rows of all."""
    form, shape = READABLE.get(entry.dtype), entry.shape or (1,)  # () is one number
    while len(shape) > 3 and shape[0] == 1:
        shape = shape[1:]
    if form is None or not 1 <= len(shape) <= 3 or 0 in shape:
        raise ModelError(
            f"{file.path} has {name} as {entry.dtype} {entry.shape}: a vector or matrix of"
            f" {', '.join(READABLE)} expected"
        )
    n_rows = math.prod(entry.shape[:-1])
    row_bytes = entry.n_bytes // n_rows

    def rows(start: int, stop: int) -> Array:
        raw = file.read(entry.offset + start * row_bytes, (stop - start) * row_bytes)
        return _numbers(raw, entry.dtype).reshape(stop - start, -1)

    return SourceTensor(entry.dtype, shape, entry.n_bytes, form, rows)


def _numbers(raw: bytes, dtype: str) -> Array:
    if dtype == "BF16":
        return from_bf16(np.frombuffer(raw, "<u2"))
    return np.frombuffer(raw, "<f4" if dtype == "F32" else "<f2").astype(np.float32)


def open_all(directory: ModelDirectory, names: list[str], stack: ExitStack) -> Shards:
    """Open every file, until `stack` ends, with its table of tensors."""
    files = [stack.enter_context(directory.open(name)) for name in names]
    return [(file, read_entries(file)) for file in files]


def renamed(entries: Mapping[str, Entry], beginnings: Mapping[str, str], n_layers: int) -> dict[str, Entry]:
    """Entries whose names have one of the `beginnings`, each replaced by its value; "": left out. "{n}" in
    beginnings stands for `n_layers`."""
    beginnings = {theirs.replace("{n}", str(n_layers)): ours for theirs, ours in beginnings.items()}
    chosen = {}
    for theirs, entry in entries.items():
        stem = next((stem for stem in beginnings if theirs.startswith(stem)), None)
        if stem is not None and beginnings[stem]:
            chosen[beginnings[stem] + theirs.removeprefix(stem)] = entry
    return chosen
