"""Loads a `PackedModel` by name or path, through a packed file that later starts only map. The first start
reads the source and packs it; every later one compares the source's names, sizes and times with what the
packed file was made from, and maps it. Readers of foreign formats are imported on the first path only. A
packed file that is named itself is mapped without its source."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from phasewise._words import reason_of
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.fetching.resolve import Located, cache_root, locate
from phasewise.serving.loaders.packed_file import (
    is_packed,
    open_packed,
    pack_in_memory,
    read_in_memory,
    read_packed,
    versions,
    write_packed,
)
from phasewise.serving.loaders.source import ModelSource
from phasewise.serving.loaders.storage import FILE_SUFFIXES, StorageChoice
from phasewise.serving.models.encoding import Embedding
from phasewise.serving.models.packed_model import FORMATS, ModelConfig, PackedModel
from phasewise.serving.models.storage_modes import PackMode, SparseMode

Report = Callable[[str], None]


def load_model(
    ref: str,
    format: str,
    cache_dir: Path | None = None,
    report: Report | None = None,
    *,
    pack: PackMode = "keep",
    storage: StorageChoice | None = None,
) -> PackedModel:
    """Load the model that `ref` names, in a weight format of `FORMATS`, packed now or earlier.

    `ref`: a known name (fetched when absent), a GGUF file, a Hugging Face directory, a hub name or a packed
    file. `cache_dir`: the directory of packed files and fetched models; None: the user's cache directory.
    `report`: receives a line for each thing that takes long. `pack`: where the packed model lies; under
    `check` a file of the cache whose arrays lack their checksum is made anew. `storage`: the choice of
    weights that are stored sparse; None: `auto`. Raises ModelError."""
    if format not in FORMATS:
        raise ModelError(f"weight format {format!r:.80} is not one of {', '.join(FORMATS)}")
    report, storage, checksum = report or _silent, storage or StorageChoice(), pack == "check"
    root = cache_root(cache_dir)
    located = locate(ref, root, report)
    if is_packed(located.path):
        return open_packed(
            located.path, format, None if storage.mode == "auto" else storage, checksum=checksum
        )
    identity = _identity(located, format)
    if pack == "memory":
        with open_source(located) as source:
            file = pack_in_memory(source, format, identity, report, storage)
        return read_in_memory(file, identity, located.path)
    for suffix in dict.fromkeys(("", storage.file_suffix)):  # a dense model is stored alike by every choice
        target = root / "packed" / _file_name(located, format + suffix)
        model = read_packed(target, identity, located.path, choice=storage, checksum=checksum)
        if model is not None:
            return model
    with open_source(located) as source:
        return _kept(source, format, identity, target, report, storage)


def load_head(
    model: PackedModel, format: str, cache_dir: Path | None = None, report: Report | None = None
) -> PackedModel | None:
    """Load the draft head in the files of `model`, with the embeddings that both share, and pack it to where
    `model` lies; None where there is no supported one, and for a packed file that was named itself. `format`,
    `cache_dir`, `report`: as for `load_model`. Raises ModelError."""
    from phasewise.serving.models.draft_head import with_own_head

    located, report = head_place(model.config.architecture, model.name, model.source), report or _silent
    if located is None or is_packed(located.path):
        return None
    identity = f"{_identity(located, format)}\nhead"
    target = cache_root(cache_dir) / "packed" / _file_name(located, f"{format}-head")
    in_memory = model.is_in_memory
    head = None if in_memory else read_packed(target, identity, located.path)
    if head is None:
        with open_head_source(located) as source:
            if source is None:
                return None
            if in_memory:
                file = pack_in_memory(source, format, identity, report, _DENSE)
                head = read_in_memory(file, identity, located.path)
            else:
                head = _kept(source, format, identity, target, report, _DENSE)
    return with_own_head(head, model)


_DENSE = StorageChoice("never")


def _kept(
    source: ModelSource, format: str, identity: str, target: Path, report: Report, storage: StorageChoice
) -> PackedModel:
    """Pack a model into a file of the cache, and map it."""
    try:
        kept_in = f"{target.parent}, which later starts map"
        write_packed(source, format, identity, target, kept_in, report, storage)
    except OSError as error:
        raise ModelError(
            f"the packed model cannot be kept in {target.parent}: {reason_of(error)}; PHASEWISE_CACHE names"
            " another directory, --pack memory keeps it on no disk"
        ) from error
    model = read_packed(target, identity, source.path)
    if model is None:
        raise ModelError(f"the packed model {target} does not read back as written: is the disk failing?")
    return model


def pack_model(ref: str, format: str, target: Path, kept_in: str, report: Report, sparse: SparseMode) -> None:
    """Pack the model that `ref` names into a file that is opened by its own path, without the source and on
    any machine. `kept_in`: its place, for people. Raises ModelError, and OSError where it cannot be
    written."""
    located = locate(ref, cache_root(None), report)
    with open_source(located) as source:
        identity = "\n".join([versions(), format])
        write_packed(source, format, identity, target, kept_in, report, StorageChoice(sparse))
    open_packed(target, format)


def head_place(architecture: str, name: str, source: Path | str) -> Located | None:
    """The files in which a draft head may lie; None for a family or file format without supported heads."""
    from phasewise.serving.loaders.families import family_named

    family, path = family_named(architecture), Path(source)
    has_heads = family is not None and (bool(family.hf_head) if path.is_dir() else family.gguf_head)
    return Located(name, path) if has_heads else None


def open_head_source(located: Located | None) -> AbstractContextManager[ModelSource | None]:
    """Open the draft head in the files of `head_place`; None where there is no head."""
    from phasewise.serving.loaders.formats.heads import open_head

    source = None if located is None else open_head(located.path, located.name)
    return nullcontext() if source is None else _checked(source)


def is_made_for_embedding(
    ref: str, format: str, cache_dir: Path | None = None, report: Report | None = None
) -> bool:
    """True if the model that `ref` names gives vectors. Arguments as for `config_of_model`."""
    return _facts_of(ref, format, cache_dir, report)[1] is not None


def config_of_model(
    ref: str, format: str, cache_dir: Path | None = None, report: Report | None = None
) -> ModelConfig:
    """Read the config of the model that `ref` names, from a packed file or the source, without packing.
    `ref`, `cache_dir`, `report`: as for `load_model`. Raises ModelError."""
    return _facts_of(ref, format, cache_dir, report)[0]


def _facts_of(
    ref: str, format: str, cache_dir: Path | None, report: Report | None
) -> tuple[ModelConfig, Embedding | None]:
    root = cache_root(cache_dir)
    located = locate(ref, root, report or _silent)
    if is_packed(located.path):
        model = open_packed(located.path, format)
        return model.config, model.embedding
    identity = _identity(located, format)
    for suffix in FILE_SUFFIXES:
        kept = read_packed(root / "packed" / _file_name(located, format + suffix), identity, located.path)
        if kept is not None:
            return kept.config, kept.embedding
    with open_source(located) as source:
        return source.config, source.embedding


def open_source(located: Located) -> ModelSource:
    """Open a model in its own format, checked against its config. Close the source, or use it in `with`."""
    return _checked(_open(located))


def _checked(source: ModelSource) -> ModelSource:
    from phasewise.serving.loaders.layout import check_tensors

    try:
        check_tensors(source)
    except BaseException:
        source.close()
        raise
    return source


def _open(located: Located) -> ModelSource:
    if located.path.is_dir():
        from phasewise.serving.loaders.formats.hf_model import open_hf_model

        return open_hf_model(located.path, located.name)
    if is_packed(located.path):
        raise ModelError(f"{located.path} is a packed model, made to be run: give the model it was made from")
    if located.path.suffix == ".safetensors":
        raise ModelError(f"{located.path} is only the weights of a model: give the directory that holds it")
    from phasewise.serving.loaders.formats.gguf_model import open_gguf_model

    return open_gguf_model(located.path, located.name)


def _identity(located: Located, weight_format: str) -> str:
    """The versions, settings and source files (name, size, time) that a packed file was made from."""
    try:
        stats = [(path.name, path.stat()) for path in located.files()]
    except OSError as error:
        raise ModelError(f"{located.path} cannot be read: {reason_of(error)}") from error
    seen = [f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats]
    return "\n".join([versions(), weight_format, str(located.path.resolve()), *seen])


def _file_name(located: Located, weight_format: str) -> str:
    """The name of a packed file, one for each source and format: a changed source replaces its old file."""
    place = hashlib.sha256(os.fsencode(located.path.resolve())).hexdigest()[:12]
    return f"{located.name[:80].replace('/', '--')}-{weight_format}-{place}.packed"


def _silent(line: str) -> None:
    del line
