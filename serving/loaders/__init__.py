"""Loads a `PackedModel` by name or path, through a packed file that later starts only map. The first start
reads the source and packs it; every later one compares the source's names, sizes and times with what the
packed file was made from, and maps it. Readers of foreign formats are imported on the first path only."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from phasewise._words import reason_of
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.fetching.resolve import Located, cache_root, locate
from phasewise.serving.loaders.packed_file import read_packed, versions, write_packed
from phasewise.serving.loaders.source import ModelSource
from phasewise.serving.loaders.storage import FILE_SUFFIXES, StorageChoice
from phasewise.serving.models.encoding import Embedding
from phasewise.serving.models.packed_model import FORMATS, ModelConfig, PackedModel

Report = Callable[[str], None]


def load_model(
    ref: str,
    format: str,
    cache_dir: Path | None = None,
    report: Report | None = None,
    *,
    checksum: bool = False,
    storage: StorageChoice | None = None,
) -> PackedModel:
    """Load the model that `ref` names, in a weight format of `FORMATS`, packed now or earlier.

    `ref`: a known name (fetched when absent), a GGUF file, a Hugging Face directory or a hub name.
    `cache_dir`: the directory of packed files and fetched models; None: the user's cache directory. `report`:
    receives a line for each thing that takes long. `checksum`: True to compare the arrays with their
    checksum, and pack anew if they differ. `storage`: the choice of weights that are stored sparse; None:
    `auto`. Raises ModelError."""
    if format not in FORMATS:
        raise ModelError(f"weight format {format!r:.80} is not one of {', '.join(FORMATS)}")
    report, storage = report or _silent, storage or StorageChoice()
    root = cache_root(cache_dir)
    located = locate(ref, root, report)
    identity = _identity(located, format)
    for suffix in dict.fromkeys(("", storage.file_suffix)):  # a dense model is stored alike by every choice
        target = root / "packed" / _file_name(located, format + suffix)
        model = read_packed(target, identity, located.path, choice=storage, checksum=checksum)
        if model is not None:
            return model
    report(f"packing {located.name} as {format}; later starts map the result")
    with open_source(located) as source:
        write_packed(source, format, identity, target, report, storage)
    model = read_packed(target, identity, located.path)
    if model is None:
        raise ModelError(f"the packed model {target} does not read back as written: is the disk failing?")
    return model


def load_head(
    model: PackedModel, format: str, cache_dir: Path | None = None, report: Report | None = None
) -> PackedModel | None:
    """Load the draft head in the files of `model`, with the embeddings that both share; None where there is
    no supported one. `format`, `cache_dir`, `report`: as for `load_model`. Raises ModelError."""
    from phasewise.serving.models.draft_head import with_own_head

    located = head_place(model.config.architecture, model.name, model.source)
    if located is None:
        return None
    identity = f"{_identity(located, format)}\nhead"
    target = cache_root(cache_dir) / "packed" / _file_name(located, f"{format}-head")
    head = read_packed(target, identity, located.path)
    if head is None:
        with open_head_source(located) as source:
            if source is None:
                return None
            write_packed(source, format, identity, target, report or _silent)
        head = read_packed(target, identity, located.path)
    if head is None:
        raise ModelError(f"the packed head {target} does not read back as written: is the disk failing?")
    return with_own_head(head, model)


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
    identity = _identity(located, format)
    for suffix in FILE_SUFFIXES:
        model = read_packed(root / "packed" / _file_name(located, format + suffix), identity, located.path)
        if model is not None:
            return model.config, model.embedding
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
