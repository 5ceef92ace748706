"""From a path to an adapter of a model that is open."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from phasewise._words import counted
from phasewise.cython_kernels._native import MAX_ADAPTERS
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.adapter_files import Pair, adapter_of, parts_of
from phasewise.serving.models.linears import Adapter, LowRank
from phasewise.serving.models.packed_model import ModelConfig, PackedModel


def load_adapter(name: str, path: Path, config: ModelConfig) -> Adapter:
    """PEFT's directory, or a GGUF file. ModelError in one line for what cannot run beside this model."""
    return adapter_of(name, load_parts(path, config), config)


def load_parts(path: Path, config: ModelConfig) -> dict[str, LowRank]:
    """Its numbers, by our names of the weights that they are added to. ModelError."""
    check_takes_adapters(config, path)
    with ExitStack() as stack:
        return parts_of(_pairs(path, config, stack), config, str(path))


def check_takes_adapters(config: ModelConfig, path: Path) -> None:
    """ModelError for a model that no adapter can be added to. path: of one, for the error."""
    if config.encoder is not None:
        raise ModelError(f"{path}: adapters are for models that generate text")
    why = ""
    if config.state is not None:
        why = "whose layers keep a state"
    elif config.has_mixed_heads or config.shared_kv_layers:
        why = "whose layers have heads of their own"
    elif config.latent is not None:
        why = "whose attention is over latent vectors"
    if why:
        raise ModelError(f"{path}: {config.architecture} models, {why}, take no adapters")


def _pairs(path: Path, config: ModelConfig, stack: ExitStack) -> dict[str, Pair]:
    """Readers of foreign formats are imported for the format that it is."""
    if path.is_dir():
        from phasewise.serving.loaders.adapter_files import peft_pairs

        return peft_pairs(path, config, stack)
    if path.suffix == ".safetensors":
        raise ModelError(f"{path} is only the numbers of an adapter: give the directory that holds it")
    from phasewise.serving.loaders.adapter_files import gguf_pairs

    return gguf_pairs(path, config, stack)


def with_adapters(model: PackedModel, lora: Sequence[str]) -> PackedModel:
    """The model with adapters of `NAME=PATH` each, numbered in this order. ModelError."""
    if not lora:
        return model
    named = named_paths(lora)
    if len(named) > MAX_ADAPTERS:
        raise ModelError(f"{counted(len(named), 'adapter')} of one model; at most {MAX_ADAPTERS} can run")
    if model.config.encoder is not None or model.embedding is not None:
        raise ModelError(f"{model.name} makes vectors: adapters are for models that generate text")
    adapters = tuple(load_adapter(name, path, model.config) for name, path in named)
    return replace(model, adapters=adapters)


NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)


def named_path(text: str) -> tuple[str, Path]:
    """The name and the path of `NAME=PATH` or `PATH`. ModelError for a name that no request could say."""
    name, equals, path = text.partition("=")
    if not equals or "/" in name:
        path = text
        name = Path(text).name.removesuffix(".gguf")
    if not NAME.fullmatch(name) or not path:
        raise ModelError(
            f"adapter {text!r:.120}: NAME=PATH expected, a name of letters, digits, '.', '_' and '-'"
        )
    return name, Path(path)


def named_paths(texts: Sequence[str]) -> list[tuple[str, Path]]:
    """All of them. ModelError where two have one name."""
    named = [named_path(text) for text in texts]
    names = [name for name, _ in named]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ModelError(f"two adapters are called {twice}: give another name with NAME=PATH")
    return named
