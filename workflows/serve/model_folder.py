"""A folder of models for `serve --models`: their names, and each from its file to an engine.

A GGUF file is called by its name without `.gguf` (of a split one, without the number of the part too), a
Hugging Face directory by its own. Requests choose among these names; none becomes part of a path.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from phasewise._words import counted
from phasewise.kerneldb.errors import KernelDbError
from phasewise.serving.engine.engine_size import default_kv_bytes
from phasewise.serving.errors import ModelError, ServingError
from phasewise.serving.http.http_settings import ModelFacts
from phasewise.serving.http.models.model_shelf import MeasuredModel, ModelFile, ModelFolder
from phasewise.serving.loaders import config_of_model, is_made_for_embedding, open_source
from phasewise.serving.loaders.adapter_files import load_adapter, named_path, named_paths
from phasewise.serving.loaders.fetching.resolve import Located
from phasewise.serving.loaders.formats.gguf_file import part_paths, stem_of
from phasewise.serving.model_table import TextRow
from phasewise.serving.processes.headroom import available_bytes
from phasewise.tuner.errors import TunerError
from phasewise.workflows.errors import UsageError, WorkflowError
from phasewise.workflows.opening.open_model import check_settings
from phasewise.workflows.opening.settings import Weights
from phasewise.workflows.report import Report
from phasewise.workflows.serve.opened_models import Opener

SHARE_OF_FREE_MEMORY = 0.75
"""Share of free memory that all models may take together where no budget is named."""
KV_SHARE = 0.25
"""The most of the budget that one model takes for keys and values, where --kv-budget names none."""

_LAST_SECOND = 253_402_300_799
"""The last second of the year 9999, where dates end. Files may have any time."""


@contextmanager
def _told_as_ours() -> Iterator[None]:
    """Turn errors of plans, the database or settings into ModelError, which the model's requester is told."""
    try:
        yield
    except (KernelDbError, TunerError, WorkflowError, OSError, MemoryError) as error:
        raise ModelError(str(error) or type(error).__name__) from error


def model_folder(opener: Opener) -> ModelFolder[TextRow]:
    """The folder of `--models`. UsageError where there is no such folder, or two models have one name."""
    settings, report = opener.settings, opener.report
    coming = settings.coming
    assert coming.models is not None
    folder = coming.models
    if not folder.is_dir():
        raise UsageError(f"--models {folder}: there is no such folder")
    paths: dict[str, Path] = {}
    for name, path in _models_in(folder):
        if name in paths:
            raise UsageError(f"--models {folder}: {paths[name].name} and {path.name} are both called {name}")
        paths[name] = path
    named_paths(settings.weights.lora or ())  # or what is wrong with a name
    report(f"{counted(len(paths), 'model')} in {folder}, loaded when requests name them")
    with suppress(OSError):
        for path in folder.iterdir():
            if not _is_text(path.name):
                report(f"{path.name!r} is left out: its name is not UTF-8, so no request can name it")
    budget = coming.models_memory
    if budget is None and (free := available_bytes()) is not None:
        budget = int(free * SHARE_OF_FREE_MEMORY)
    if budget is not None:
        report(f"models in memory take at most {budget / (1 << 20):.0f} MiB together")

    def measure(name: str) -> MeasuredModel[TextRow]:
        path = dict(reversed(list(_models_in(folder)))).get(name)
        if path is None:
            raise ModelError(f"it has just gone from {folder}")
        with _told_as_ours():
            return _measured(name, path, opener, budget)

    def files() -> Mapping[str, ModelFile]:
        paths = dict(reversed(list(_models_in(folder))))  # of two with one name the first
        return {name: _file_of(paths[name]) for name in sorted(paths)}

    def facts(name: str) -> ModelFacts:
        path = dict(reversed(list(_models_in(folder)))).get(name)
        return ModelFacts() if path is None else _facts_of(path, _file_of(path))

    return ModelFolder(files, measure, facts, budget, coming.keep_alive)


@lru_cache(maxsize=1024)
def _facts_of(path: Path, as_it_is: ModelFile) -> ModelFacts:
    """Facts that a file states before it is loaded; no facts of an unreadable file."""
    try:
        with open_source(Located(path.name, path)) as source:
            tensors = source.tensors.values()
            numbers = sum(math.prod(tensor.shape) for tensor in tensors)
            largest = max(tensors, key=lambda tensor: tensor.n_bytes, default=None)
            kind = "" if largest is None else largest.type_name
            return ModelFacts(source.config.architecture, numbers, as_it_is.n_bytes, kind)
    except (ServingError, OSError):
        return ModelFacts()


def _measured(name: str, path: Path, opener: Opener, budget: int | None) -> MeasuredModel[TextRow]:
    ref, settings, report = str(path), opener.settings, opener.report
    if is_made_for_embedding(ref, settings.weights.weight_format, report=report):
        raise ModelError("it makes vectors, and a folder serves text: give it a server of its own")
    weights = _with_adapters_that_fit(ref, settings.weights, report)
    check_settings(ref, weights, settings.kv.kv_format, report)
    opener = replace(opener, settings=replace(settings, weights=weights))
    opened, kv_bytes = opener.loaded(ref), settings.kv.kv_budget_bytes
    if kv_bytes is None and budget is not None:
        kv_bytes = min(default_kv_bytes(opened.model, available_bytes()), int(budget * KV_SHARE))
    sized = opener.sized(ref, opened, kv_bytes)

    def opened_row(stack: ExitStack) -> TextRow:
        with _told_as_ours():
            return opener.open(sized, (name,), stack).row

    return MeasuredModel(sized.n_bytes, opened_row)


def _with_adapters_that_fit(ref: str, weights: Weights, report: Report) -> Weights:
    """`weights` with those adapters whose shapes fit the model."""
    if not weights.lora:
        return weights
    config, fitting = config_of_model(ref, weights.weight_format, report=report), list[str]()
    for given in weights.lora:
        try:
            load_adapter(*named_path(given), config)
        except ModelError as error:
            report(f"{Path(ref).name} has no adapter {given}: {error}")
        else:
            fitting.append(given)
    return replace(weights, lora=fitting)


def _models_in(folder: Path) -> Iterator[tuple[str, Path]]:
    """Models of a folder with their names, sorted by path."""
    try:
        paths = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError:
        return
    for path in paths:
        name = _name_of(path)
        if name is not None:
            yield name, path


def _name_of(path: Path) -> str | None:
    """The name that requests use; None: no model, or a path that cannot be read or named."""
    if not _is_text(path.name):
        return None
    try:
        if path.suffix == ".gguf" and path.is_file():
            return stem_of(path.name) if part_paths(path)[0] == path else None
        return path.name if (path / "config.json").is_file() else None
    except OSError:
        return None


def _is_text(name: str) -> bool:
    """False for a name with bytes that are not UTF-8."""
    return name.encode(errors="replace") == os.fsencode(name)


def _file_of(path: Path) -> ModelFile:
    files, sizes = part_paths(path), []
    with suppress(OSError):  # a directory that cannot be read
        files = list(path.glob("*.safetensors")) if path.is_dir() else files
    for file in files:
        with suppress(OSError):  # it may go while the folder is listed
            sizes.append(file.stat())
    modified_s = max((stat.st_mtime for stat in sizes), default=0)
    return ModelFile(sum(stat.st_size for stat in sizes), int(min(max(modified_s, 0), _LAST_SECOND)))
